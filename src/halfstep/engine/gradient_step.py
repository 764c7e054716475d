"""From scaled gradients to a step: unscale, check, clip, agree with the other ranks, step or skip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import version_of
from halfstep.distributed import Ranks
from halfstep.engine.gradients import Gradients
from halfstep.engine.rounds import Turn
from halfstep.errors import RanksDisagreeError
from halfstep.scaler import LossScaler, Scaling

__all__ = ["GradientStep", "Outcome"]


class Outcome(NamedTuple):
    """What became of a step.

    It is a tuple because one is made in every step: a frozen dataclass takes three times as long to make.

    Attributes:
        skipped: Whether it was not taken; `None` while only the device knows.
        found_inf: The verdict on the gradients; `None` where nothing was checked.
        norm: The norm of the gradients before clipping; `None` when it was not measured.
        scale: The loss scale that they were computed with.
    """

    skipped: bool | None
    found_inf: Tensor | None
    norm: Tensor | None
    scale: Tensor | float


@final
class GradientStep:
    """The end of a step, for optimizers that step together.

    Args:
        optimizers: Those that step together.
        gradients: Theirs.
        scaler: The loss scaler; one of scale 1 only checks the gradients, and with `None` nothing is checked.
        ranks: The processes that train together; `None` when this one trains alone.
        max_grad_norm: What the norm of the gradients is clipped to; `None` for no clipping, infinity to measure it.
        max_grad_value: What each element is clamped to; `None` for no clamping.
        on_host: Whether each step's answer is needed on the host at once.
        device: The model's.
    """

    def __init__(
        self,
        *,
        optimizers: Sequence[Optimizer],
        gradients: Gradients,
        scaler: torch.amp.GradScaler | None,
        ranks: Ranks | None,
        max_grad_norm: float | None,
        max_grad_value: float | None,
        on_host: bool,
        device: torch.device,
    ) -> None:
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
        self._agreed = ranks is None
        self.compare_states = False

    @property
    def _moving(self) -> bool:
        scaler = self._scaler  # A loaded state may have brought other settings.
        return scaler is not None and not (isinstance(scaler, LossScaler) and scaler.settings.static)

    def turn(self) -> Turn | None:
        """A place among the engines that share the scaler; `None` without one."""
        return None if self.scaling is None or self._scaler is None else Turn(self.scaling, self._scaler)

    def judge(self, *, factor: float = 1.0, unscaled: bool = False) -> Tensor | None:
        """Makes the gradients those that the optimizers shall see, and has the scaler's verdict on them ready.

        Args:
            factor: What they are multiplied by.
            unscaled: Whether they were unscaled before, so that somebody may have changed them since.

        Returns:
            Their norm before clipping; `None` when it was not measured.

        Raises:
            RanksDisagreeError: The scalers of the ranks are not in the same state.
        """
        scaling = self.scaling
        gradients = self._gradients.tensors()
        if scaling is not None:
            if unscaled:
                scaling.check_again()
            else:
                scaling.unscale(gradients)
        if factor != 1:
            self._gradients.multiply(factor)
        norm = None
        if self._clips:
            norm = self._gradients.clip(gradients, max_norm=self._max_norm, max_value=self._max_value)
            if scaling is not None and norm is not None and self._max_norm != math.inf:
                scaling.check_norm(norm)
        if self._ranks is not None and scaling is not None:
            self._agree(self._ranks, scaling)
        return norm

    def take(self, *, factor: float = 1.0, unscaled: bool = False) -> Outcome:
        """Ends the step: takes it or skips it.

        Args:
            factor: What the gradients are multiplied by before they are clipped.
            unscaled: Whether they were unscaled before.
        """
        norm = self.judge(factor=factor, unscaled=unscaled)
        scaling = self.scaling
        if scaling is None:
            for optimizer in self._optimizers:
                optimizer.step()
            return Outcome(skipped=False, found_inf=None, norm=norm, scale=1.0)
        found = scaling.found_inf
        waits = self._on_host or not scaling.leaves_verdict_on_device()
        scale = self.scale(reads_at_once=waits and self.device.type == "cpu")
        skipped = scaling.step(on_host=waits)
        return Outcome(skipped=skipped, found_inf=found, norm=norm, scale=scale)

    def scale(self, *, reads_at_once: bool) -> Tensor | float:
        """The scale of the gradients of this step.

        Args:
            reads_at_once: Whether the host may wait for it; otherwise it is a copy, since the scaler writes the next one into its tensor.
        """
        if self._moving and self.scaling is not None:
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
        if not self._moving:
            ranks.maximize_(found)
            return
        if not self._agreed:
            self._compare(ranks)
        # The same reduction tells whether all scales are the same: the largest one, and minus the smallest one.
        state = scaling.state_on(self.device)
        together = torch.cat([found.reshape(1), state, -state])
        ranks.maximize_(together)
        found.copy_(together[0])
        if self.compare_states or self._on_host or not scaling.leaves_verdict_on_device():
            self.compare_states = False
            _, *bounds = together.tolist()
            largest, smallest = bounds[: len(state)], [-value for value in bounds[len(state) :]]
            if largest != smallest:
                spread = " and ".join(
                    f"the {what} from {low:g} to {high:g} (here {own:g})"
                    for what, low, high, own in zip(("scales go", "growth trackers go"), smallest, largest, state.tolist(), strict=False)
                    if low != high
                )
                raise RanksDisagreeError(
                    f"The loss scalers of the {ranks.size} ranks have drifted apart; on rank {ranks.rank}: {spread}. Load the same scaler "
                    "state on every rank, and change a scale on all of them."
                )

    def _compare(self, ranks: Ranks) -> None:
        assert self._scaler is not None
        counted = ("steps", "skips", "consecutive_skips")
        own = {name: value for name, value in self._scaler.state_dict().items() if name not in counted}
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
                f"The loss scalers of the ranks differ, so that they would drift apart without a word: {listed}. Make them with the same "
                "arguments, and load the same state on every rank before the first step."
            )
