"""What is known of each scaler, optimizer and autocast region of a loop that is followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import found_infs, version_of
from halfstep.records import Precision, ScalerUse
from halfstep.scaler import LossScaler
from halfstep.watching.lines import NOWHERE, Line
from halfstep.watching.measures import gradient_norm, number_of, scaled_down

__all__ = ["Contribution", "OptimizerState", "RegionState", "ScalerState", "parameters_of"]

# So many parameters stand for all of an optimizer's: whether a backward pass reached it is seen by their gradients.
_WITNESSES: Final = 4

_ABSENT: Final = -1

# A norm that a loop does not need itself is a pass over all gradients; in the first steps there is one each time.
_NORM_EVERY: Final = 10


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, or of what stands for one."""
    return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]


@final
@dataclass(slots=True, eq=False)
class ScalerState:
    """A loss scaler that is switched on.

    Attributes:
        scaler: It.
        created: Where it was made; unknown where that was before it was followed.
        first_use: Where it first scaled.
        was_used: Whether it had scaled something before it was followed.
        updated: Where it last updated.
        stepped: Where it last stepped an optimizer.
        pending: The optimizers that it has stepped since its last update.
        unscaled: Those whose gradients it has unscaled since then.
        updates: How often it has updated.
        steps: How many steps it was asked for.
        iterations: How many backward passes of its losses there were since its last update, and in how many updates.
        scale: What this iteration's losses were multiplied with: a number, or a tensor on its device.
        constants: What it has scaled since its last update that has no graph, such as a one that losses are then multiplied with.
    """

    scaler: ref[Any]
    created: Line = NOWHERE
    first_use: Line = NOWHERE
    was_used: bool = False
    updated: Line = NOWHERE
    stepped: Line = NOWHERE
    pending: list[OptimizerState] = field(default_factory=list)
    unscaled: list[OptimizerState] = field(default_factory=list)
    updates: int = 0
    steps: int = 0
    iterations: int = 0
    scale: float | Tensor = 1.0
    constants: list[Tensor] = field(default_factory=list)

    @property
    def is_used(self) -> bool:
        """Whether it has scaled something."""
        return self.was_used or self.first_use is not NOWHERE

    @property
    def place(self) -> Line:
        """Where it was made, or else first used."""
        return self.first_use if self.created is NOWHERE else self.created


@final
@dataclass(slots=True, eq=False)
class RegionState:
    """An autocast region that was entered.

    Attributes:
        identity: Its `id`, while it is entered.
        device_type: Its device type.
        dtype: What it computes in; `None` where it switches autocast off.
        is_meant: Whether its user asked for autocast; torch refuses that for a device that there is none of.
        keeps_casts: Whether it keeps the weights that it casts.
        is_training: Whether gradients were on when it was entered.
        line: Where it was entered.
        steps: How many optimizer steps there were in it.
    """

    identity: int
    device_type: str
    dtype: torch.dtype | None
    is_meant: bool
    keeps_casts: bool
    is_training: bool
    line: Line
    steps: int = 0


@final
@dataclass(slots=True, eq=False)
class Contribution:
    """A backward pass that added to the gradients of an optimizer.

    Attributes:
        line: Where it was called.
        scaler: Whose scaled loss it was; `None` where no scaler had a part in it.
        update: How often that scaler had updated by then.
        region: The autocast region of its forward pass; `None` where there was none.
        dtype: What that computes in.
        is_loss: Whether it began with a loss, and not with gradients that come from elsewhere.
        thread: The number of the thread that called it.
        is_half: Whether its forward pass was seen to compute in half precision.
        loss: The loss without its scale: a number, or a tensor on its device; NaN where it is not one number.
    """

    line: Line
    scaler: ScalerState | None
    update: int
    region: RegionState | None
    dtype: torch.dtype | None
    thread: int
    is_loss: bool
    is_half: bool
    loss: float | Tensor


@final
@dataclass(slots=True, eq=False)
class OptimizerState:
    """An optimizer.

    Attributes:
        optimizer: It.
        name: What records call it; empty where there is one.
        identities: Of its parameters, by `id`.
        contributions: The backward passes that made its gradients as they are now.
        scaler: The scaler that last stepped it.
        is_unscaled: Whether that has unscaled its gradients since it last updated.
        is_stepped: Whether it has stepped since the last of the contributions.
        is_running: Whether its `step` runs, or was called by the scaler that steps it now.
        steps: How many steps it was asked for.
        thread: The number of the thread that stepped it last; 0 before that.
        norm: The norm of its gradients without their scale, where the loop has computed it.
        found_inf: 1 where the step that runs will not be taken, as far as its device tells.
        line: Where the step that runs was called.
        clips_scaled: Whether its gradients were scaled when they were last clipped.
        missing: How many parameters had no gradient when they were last looked at.
        schedules: For each of its schedulers, by `id`, the number of steps when that last moved.
        ahead: For each of them, how often it moved with a step that was skipped.
        precision: What its forward pass computed in, when that was last looked at.
        use: What part a loss scaler had in it then.
        looks: How often its parameters were to be looked at.
        was_scaled: Whether its losses were scaled then.
        last_line: Where it was stepped then.
        last_skipped: Whether its last step was skipped; a tensor where only the device knows.
        sample: A parameter that the last pass reached.
        sample_version: The version of its gradient, while steps are not looked at.
        skips: How many of its steps were skipped.
        skips_in_row: How many of those are its last ones.
        model: What holds its parameters, once that was looked for.
    """

    optimizer: ref[Any]
    name: str = ""
    identities: frozenset[int] = frozenset()
    contributions: list[Contribution] = field(default_factory=list)
    scaler: ScalerState | None = None
    is_unscaled: bool = False
    is_stepped: bool = False
    is_running: bool = False
    steps: int = 0
    thread: int = 0
    norm: float | Tensor | None = None
    found_inf: Tensor | None = None
    line: Line | None = None
    clips_scaled: bool = False
    missing: int = 0
    schedules: dict[int, int] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    precision: Precision = "fp32"
    use: ScalerUse = "none"
    looks: int = 0
    was_scaled: bool = False
    last_line: Line = NOWHERE
    last_skipped: bool | Tensor = False
    sample: ref[Tensor] | None = None
    sample_version: int = _ABSENT
    skips: int = 0
    skips_in_row: int = 0
    model: ref[nn.Module] | None = None
    _witnesses: Sequence[ref[Tensor]] = ()
    _versions: list[int] = field(default_factory=list)
    _gradients: list[int] = field(default_factory=list)
    _shape: tuple[int, ...] = ()

    @property
    def is_deferred(self) -> bool:
        """Whether the host knows only later what becomes of its steps."""
        return isinstance(self.last_skipped, Tensor)

    def take_norm(self, count: int, total_norm: object, *, scale: float | Tensor, norm_type: float) -> None:
        """Takes the norm of the gradients from a loop that is about to clip them, or computes it now and then.

        Args:
            count: Of how many parameters it is.
            total_norm: The norm that the loop has computed.
            scale: What the gradients are multiplied with.
            norm_type: Of that norm.
        """
        if self.norm is None and norm_type == 2.0 and count == len(self.identities) and isinstance(total_norm, Tensor):
            self.norm = scaled_down(number_of(total_norm), scale)
        else:
            self.measure(scale=scale)

    def measure(self, *, scale: float | Tensor) -> None:
        """Computes the norm of the gradients, unless it is known, in the first steps and then now and then.

        Args:
            scale: What the gradients are multiplied with.
        """
        if self.norm is None and (self.steps < _NORM_EVERY or self.steps % _NORM_EVERY == 0):
            norm = gradient_norm(parameters_of(self.optimizer()))
            self.norm = None if norm is None else scaled_down(norm, scale)

    def is_skipped(self) -> bool | Tensor:
        """Whether the step that its scaler was asked for was not taken; a tensor where only the device knows."""
        if self.found_inf is not None:
            verdict = number_of(self.found_inf)
            return bool(verdict) if isinstance(verdict, float) else verdict
        if self.is_running:
            return False
        # No hook tells of the steps of an optimizer that is none of torch's.
        scaler = None if self.scaler is None else self.scaler.scaler()
        found = [] if scaler is None or isinstance(scaler, LossScaler) else found_infs(scaler)
        return isinstance(self.optimizer(), Optimizer) or not found or any(bool(each) for each in found)

    def refresh(self) -> None:
        """Takes in which parameters the optimizer has now."""
        groups: list[dict[str, Any]] = getattr(self.optimizer(), "param_groups", None) or []
        lists = [group["params"] for group in groups]
        shape = tuple(part for each in lists if each for part in (len(each), id(each[0]), id(each[-1])))
        if shape == self._shape:
            return
        self._shape = shape
        parameters = [each for among in lists for each in among]
        self.identities = frozenset(map(id, parameters))
        self._choose([each for each in parameters if each.requires_grad])

    def _choose(self, among: Sequence[Tensor]) -> None:
        chosen = {min(place * (len(among) - 1) // (_WITNESSES - 1), len(among) - 1) for place in range(_WITNESSES)} if among else set()
        # They must not keep alive what their user has dropped.
        self._witnesses = [ref(among[place]) for place in sorted(chosen)]
        self._versions = [_ABSENT] * len(self._witnesses)
        self._gradients = [0] * len(self._witnesses)

    def choose_reached(self) -> None:
        """Has those parameters stand for all that have gradients, since the ones before had none."""
        self._choose([each for each in parameters_of(self.optimizer()) if each.grad is not None])
        self.note_gradients()

    def look(self) -> tuple[bool, list[Tensor | None]]:
        """Whether the gradients are others than the contributions made, since they were set to `None` or to zero; and they themselves."""
        fresh, gradients = True, []
        for place, witness in enumerate(self._witnesses):
            gradient = _gradient_of(witness)
            gradients.append(gradient)
            version = _ABSENT if gradient is None else version_of(gradient)
            fresh = fresh and (gradient is None or version != self._versions[place] or id(gradient) != self._gradients[place])
            self._versions[place], self._gradients[place] = version, id(gradient)
        return fresh, gradients

    def is_reached(self, before: Sequence[Tensor | None]) -> bool:
        """Whether a backward pass has added to the gradients.

        Args:
            before: What `look` returned right before it.
        """
        reached = False
        for place, (witness, earlier) in enumerate(zip(self._witnesses, before, strict=True)):
            gradient = _gradient_of(witness)
            if gradient is None:
                continue
            version = version_of(gradient)
            if gradient is not earlier or version != self._versions[place]:
                reached, self.sample = True, witness
            self._versions[place], self._gradients[place] = version, id(gradient)
        return reached

    def note_gradients(self) -> None:
        """Takes in the gradients as they are now, after something that is known has written to them."""
        self.look()

    def drop_replaced(self) -> None:
        """Lets go of contributions whose gradients are gone: other tensors, or none, lie in their place."""
        if self.contributions and all(
            id(_gradient_of(witness)) != known for witness, known in zip(self._witnesses, self._gradients, strict=True)
        ):
            self.contributions.clear()


def _gradient_of(witness: ref[Tensor]) -> Tensor | None:
    parameter = witness()
    return None if parameter is None else parameter.grad
