"""From scaled gradients to a step: unscale, check, clip, agree with the other ranks, step or skip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import version_of
from halfstep.distributed import Ranks, gradients_agree
from halfstep.engine.audit import check_not_stale
from halfstep.engine.gradients import Gradients
from halfstep.engine.rounds import Turn
from halfstep.errors import RanksDisagreeError
from halfstep.scaler import LossScaler, Scaling

__all__ = ["GradientStep", "Outcome"]

# So many steps pass, at most, before a disagreement of the ranks that only the device knows is told. To look makes the host wait once.
_LOOK_EVERY: Final = 50


class Outcome(NamedTuple):
    """What became of a step.

    It is a tuple because one is made in every step: a frozen dataclass takes three times as long to make.

    Attributes:
        skipped: Whether it was not taken; `None` while only the device knows.
        found_inf: The verdict on the gradients; `None` where nothing was checked.
        norm: The norm of the gradients before clipping; `None` when it was not measured.
        scale: The loss scale that they were computed with.
        empty: Whether no parameter had a gradient, so that nothing moved although nothing was skipped.
    """

    skipped: bool | None
    found_inf: Tensor | None
    norm: Tensor | None
    scale: Tensor | float
    empty: bool = False


@final
class GradientStep:
    """The end of a step, for optimizers that step together.

    Args:
        model: The model.
        optimizers: Those that step together.
        gradients: Theirs.
        scaler: The loss scaler; one of scale 1 only checks the gradients, and with `None` nothing is checked.
        ranks: The processes that train together; `None` when this one trains alone.
        max_grad_norm: What the norm of the gradients is clipped to; `None` for no clipping, infinity to measure it.
        max_grad_value: What each element is clamped to; `None` for no clamping.
        on_host: Whether each step's answer is needed on the host at once.
        device: The model's.
        setup: What else the ranks must have in common, by name.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        gradients: Gradients,
        scaler: torch.amp.GradScaler | None,
        ranks: Ranks | None,
        max_grad_norm: float | None,
        max_grad_value: float | None,
        on_host: bool,
        device: torch.device,
        setup: Mapping[str, object],
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._gradients = gradients
        self._scaler = scaler
        self.scaling = None if scaler is None else Scaling(scaler, optimizers)
        self._ranks = ranks
        self._max_norm = max_grad_norm
        self._max_value = max_grad_value
        self._clips = max_grad_norm is not None or max_grad_value is not None
        self._on_host = on_host
        self.device = device
        self._setup = setup
        self._agreed = ranks is None
        # Where all ranks see the same gradients, or parts of the same, they compute the same norm by themselves.
        self._norm_ranks = None if ranks is None or gradients_agree(model, gradients.parameters(), ranks=ranks) else ranks
        self._until_look = _LOOK_EVERY
        self._apart: Tensor | None = None
        self._audited: set[int] = set()
        self._count = 0
        self.compare_states = False

    @property
    def moves_scale(self) -> bool:
        """Whether losses are scaled, and the scale moves."""
        scaler = self._scaler  # A loaded state may have brought other settings.
        return scaler is not None and not (isinstance(scaler, LossScaler) and scaler.settings.static)

    def turn(self) -> Turn | None:
        """A place among the engines that share the scaler; `None` without one."""
        return None if self.scaling is None or self._scaler is None else Turn(self.scaling, self._scaler)

    def factor(self, micro_batches: int, *, of: int) -> float | Tensor:
        """What makes the mean over the micro-batches that there are of gradients that were divided by the number of a whole group.

        Ranks may have come to different numbers, at the end of their data; all of them go by the largest, so that they stay together.

        Args:
            micro_batches: How many there are on this rank.
            of: How many a whole group has.
        """
        self._compare(self._ranks)  # Before anything else is exchanged: whether this is depends on the set-up.
        if self._ranks is None or of == 1:
            return of / micro_batches
        most = torch.full((), micro_batches, dtype=torch.float32, device=self.device)
        self._ranks.maximize_(most)
        return of / most

    def unscale(self, gradients: list[Tensor], *, factor: float | Tensor) -> None:
        """Divides the gradients by the scale, and multiplies them by a number."""
        on_device = factor if isinstance(factor, Tensor) else None
        if self.scaling is not None:
            self.scaling.unscale(gradients, factor=on_device)
        if self.scaling is None or on_device is None:
            self._gradients.multiply(factor)

    def judge(self, *, factor: float | Tensor = 1.0, unscaled: bool = False) -> Tensor | None:
        """Makes the gradients those that the optimizers shall see, and has the scaler's verdict on them ready.

        Args:
            factor: What they are multiplied by.
            unscaled: Whether they were unscaled before, so that somebody may have changed them since.

        Returns:
            Their norm before clipping; `None` when it was not measured.

        Raises:
            RanksDisagreeError: The ranks are not in the same state.
            ConfigurationError: The optimizers' parameters are no longer the model's.
        """
        scaling = self.scaling
        gradients = self._gradients.tensors()
        self._count = len(gradients)
        if self._count not in self._audited:
            self._audit(self._count)
        self._compare(self._ranks)
        if unscaled:
            if scaling is not None:
                scaling.check_again()
        elif isinstance(factor, Tensor) or factor != 1:
            self.unscale(gradients, factor=factor)
        elif scaling is not None:
            scaling.unscale(gradients)
        norm = None
        if self._clips:
            norm = self._gradients.clip(gradients, max_norm=self._max_norm, max_value=self._max_value, ranks=self._norm_ranks)
            if scaling is not None and norm is not None and self._max_norm != math.inf:
                scaling.check_norm(norm)
        if self._ranks is not None and scaling is not None:
            self._agree(self._ranks, scaling)
        return norm

    def _audit(self, count: int) -> None:
        """Looks whether the model's parameters were replaced, when so many gradients were never seen before."""
        self._audited.add(count)
        if self._ranks is None:
            check_not_stale(self._model, self._optimizers)

    def take(self, *, factor: float | Tensor = 1.0, unscaled: bool = False) -> Outcome:
        """Ends the step: takes it or skips it.

        Args:
            factor: What the gradients are multiplied by before they are clipped.
            unscaled: Whether they were unscaled before.
        """
        norm = self.judge(factor=factor, unscaled=unscaled)
        scaling = self.scaling
        empty = self._ranks is None and not self._count
        if scaling is None:
            for optimizer in self._optimizers:
                optimizer.step()
            return Outcome(skipped=False, found_inf=None, norm=norm, scale=1.0, empty=empty)
        found = scaling.found_inf
        waits = self._on_host or not scaling.leaves_verdict_on_device()
        scale = self.scale(reads_at_once=waits and self.device.type == "cpu")
        skipped = scaling.step(on_host=waits)
        return Outcome(skipped=skipped, found_inf=found, norm=norm, scale=scale, empty=empty)

    def scale(self, *, reads_at_once: bool) -> Tensor | float:
        """The scale of the gradients of this step.

        Args:
            reads_at_once: Whether the host may wait for it; otherwise it is a copy, since the scaler writes the next one into its tensor.
        """
        if self.moves_scale and self.scaling is not None:
            scale = self.scaling.scale_on(self.device)
            return scale.item() if reads_at_once else scale.clone()
        return self._scaler.settings.init_scale if isinstance(self._scaler, LossScaler) else 1.0

    def scale_version(self) -> tuple[Tensor, int]:
        """The tensor that holds the scale, and a number that changes when the scale does."""
        assert self.scaling is not None
        scale = self.scaling.scale_on(self.device)
        return scale, version_of(scale)

    def _agree(self, ranks: Ranks, scaling: Scaling) -> None:
        """Makes the verdict the same on all ranks: a step is skipped everywhere when a gradient is not finite anywhere."""
        found = scaling.verdict(self.device)
        if not self.moves_scale:
            ranks.maximize_(found)
            return
        # The same reduction tells whether all scales are the same: the largest one, and minus the smallest one.
        state = scaling.state_on(self.device)
        together = torch.cat([found.reshape(1), state, -state])
        ranks.maximize_(together)
        # Gradients in several scales do no harm: the step is skipped until the host looks and raises.
        apart = (together[1 : 1 + len(state)] != -together[1 + len(state) :]).any()
        found.copy_(torch.maximum(together[0], apart.float()))
        earlier = torch.zeros_like(together) if self._apart is None else self._apart
        self._apart = torch.where(apart, together, earlier)  # Skips bring scales to the floor, where they are the same again.
        self._until_look -= 1
        if self.compare_states or self._on_host or not self._until_look or not scaling.leaves_verdict_on_device():
            self.compare_states = False
            self._until_look = _LOOK_EVERY
            _, *bounds = self._apart.tolist()
            self._apart = None
            self._check_together(ranks, own=state.tolist(), largest=bounds[: len(state)], smallest=[-x for x in bounds[len(state) :]])

    def _check_together(self, ranks: Ranks, *, own: list[float], largest: list[float], smallest: list[float]) -> None:
        if largest != smallest:
            names = ("scales go", "growth trackers go", "skips that are still tolerated go")
            spread = " and ".join(
                f"the {what} from {low:g} to {high:g} (here {mine:g})"
                for what, low, high, mine in zip(names, smallest, largest, own, strict=False)
                if low != high
            )
            raise RanksDisagreeError(
                f"The loss scalers of the {ranks.size} ranks have drifted apart; on rank {ranks.rank}: {spread}. Load the same scaler "
                "state on every rank, and change a scale on all of them."
            )

    def _compare(self, ranks: Ranks | None) -> None:
        """Compares, once, what decides the steps of all ranks. What they exchange later depends on nothing else."""
        if self._agreed or ranks is None:
            return
        counted = ("steps", "skips", "consecutive_skips")
        state = {} if self._scaler is None else self._scaler.state_dict()
        clipping = {"max_grad_norm": self._max_norm, "max_grad_value": self._max_value, "scaler": type(self._scaler).__name__}
        own = {**self._setup, **clipping, **{name: value for name, value in state.items() if name not in counted}}
        states: list[dict[str, Any]] = ranks.gather(own)
        self._agreed = True
        names = dict.fromkeys(name for state in states for name in state)
        differing = [name for name in names if len({repr(state.get(name)) for state in states}) > 1]
        if differing:
            listed = "; ".join(
                f"rank {rank}: " + ", ".join(f"{name.lstrip('_')}={state.get(name)}" for name in differing)
                for rank, state in enumerate(states)
            )
            raise RanksDisagreeError(
                f"The ranks differ in what decides their steps, so that they would drift apart without a word: {listed}. Make the engines "
                "and scalers with the same arguments, and load the same state on every rank before the first step."
            )
