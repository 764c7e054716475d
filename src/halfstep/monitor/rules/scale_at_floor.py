"""The loss scale fell as far as it may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, counted
from halfstep.records import Alert, StepRecord

__all__ = ["ScaleAtFloor"]


class _State(NamedTuple):
    fallen: bool  # whether the scale was above its floor
    steps: int  # at the floor
    skips: int  # among them
    told: bool


_START: Final = _State(fallen=False, steps=0, skips=0, told=False)
_ABOVE: Final = _State(fallen=True, steps=0, skips=0, told=False)

# A scale that moves up and down between its floor and a little more has not recovered.
_RECOVERED: Final = 16.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAtFloor(AbstractRule):
    """The loss scale fell to its floor, and stays there or is still too high.

    Attributes:
        floor: The least that a loss scale is good for. torch's own `GradScaler` has no floor and goes on below it.
        steps: So many steps in a row at the floor are too many; a skip there is at once.

    Example:
        >>> ScaleAtFloor(floor=0.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: ScaleAtFloor(floor=0.0): allowed is a finite number above 0.
    """

    name: ClassVar[str] = "scale_at_floor"

    floor: float = 1.0
    steps: int = 10

    def __post_init__(self) -> None:
        check_numbers(self, floor=0)
        check_counts(self, steps=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts steps at the floor; a scale that was there from the start did not fall."""
        scale = record.scale
        if scale > self.floor:
            return state if state.told and scale < _RECOVERED * self.floor else _ABOVE, None
        if not state.fallen or not scale >= 0:  # NaN is not known.
            return state, None
        after = _State(fallen=True, steps=state.steps + 1, skips=state.skips + record.skipped, told=True)
        if state.told or (after.steps < self.steps and not record.skipped):
            return after._replace(told=state.told), None
        return after, self._alert(after, record)

    def _alert(self, state: _State, record: StepRecord) -> Alert:
        skips = f", and {counted(state.skips, 'step')} of them {'was' if state.skips == 1 else 'were'} skipped" if state.skips else ""
        return self.alert(
            record.step,
            message=f"The loss scale fell to {amount(record.scale)} and has been at its floor of {amount(self.floor)} or below for "
            f"{counted(state.steps, 'step')}{skips}: small gradients vanish in fp16 as if there were no scaling, and torch's own "
            "GradScaler goes on to scales whose reciprocal is infinite, which destroys the weights.",
            advice="No loss scale cures what overflows at this one: find it with `halfstep diagnose`, or train in bf16, which needs no "
            "scaler. Use halfstep.LossScaler, which has a floor (min_scale=1.0), in place of torch.amp.GradScaler.",
        )
