"""A loss scaler stands beside the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts
from halfstep.monitor.rules.wording import counted, prefix
from halfstep.records import Alert, Precision, StepRecord

__all__ = ["ScalerUnused"]


class _State(NamedTuple):
    row: int  # steps in a row that passed it by
    always: bool  # whether no other step is known
    told: bool
    step: int
    optimizer: str
    precision: Precision


_START: Final = _State(row=0, always=True, told=False, step=0, optimizer="", precision="fp32")
_OTHERWISE: Final = _State(row=0, always=False, told=False, step=0, optimizer="", precision="fp32")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerUnused(AbstractRule):
    """A loss scaler is switched on, and steps pass it by.

    Attributes:
        steps: So many steps in a row without it are told. A run that ends before that is told at its end, if no step went through it.

    Example:
        >>> ScalerUnused(steps=0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: ScalerUnused(steps=0): allowed is a whole number from 1.
    """

    name: ClassVar[str] = "scaler_unused"
    is_located: ClassVar[bool] = True

    steps: int = 100

    def __post_init__(self) -> None:
        check_counts(self, steps=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts steps that are known to pass the scaler by."""
        use = record.scaler
        if use is None:
            return state, None
        if use != "unused":
            return _OTHERWISE, None
        row = state.row + 1
        told = state.told or row >= self.steps
        after = _State(row, state.always, told, record.step, record.optimizer, record.precision)
        return after, self._alert(after) if told and not state.told else None

    def end(self, state: _State) -> Alert | None:
        """Judges a short run."""
        return self._alert(state) if state.always and state.row and not state.told else None

    def _alert(self, state: _State) -> Alert:
        steps = "the only step" if state.row == 1 else f"{counted(state.row, 'step')} in a row"
        if state.precision == "fp16":
            why = "gradients are not scaled, small ones vanish in fp16, and a step with infinite ones is taken"
            advice = "Use it: scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()."
        else:
            why = f"in {state.precision} it is not needed, but whoever reads the code takes it for used"
            advice = "Leave it out, or switch it off: torch.amp.GradScaler(enabled=False)."
        return self.alert(
            state.step,
            message=f"{prefix(state.optimizer)}There is a loss scaler that is switched on, and {steps} passed it by: {why}.",
            advice=f"{advice} halfstep.MixedPrecision scales where the precision needs it.",
        )
