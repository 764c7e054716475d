"""The loss scale is where it does no good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, counted
from halfstep.records import Alert, StepRecord

__all__ = ["ScaleOutOfRange"]

# torch's scaler doubles a scale only as long as the result is finite in float32.
_CAP: Final = 2.0**127

# The smallest positive number of fp16, and its largest.
_SMALLEST: Final = 2.0**-24
_LARGEST: Final = 65504


class _State(NamedTuple):
    scale: float  # of the last step
    moves: bool  # whether it was ever another one
    steps: int  # out of range, in a row
    told: bool
    told_of_cap: bool


_START: Final = _State(scale=math.nan, moves=False, steps=0, told=False, told_of_cap=False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOutOfRange(AbstractRule):
    """The loss scale has been so low or so high for long that it does no good.

    A scale that never moves was chosen, and is not judged.

    Attributes:
        low: Below this, gradients that matter become zero.
        high: Above this, gradients are so small that something is odd about the loss.
        steps: So many steps in a row out of this range are too many.

    Example:
        >>> ScaleOutOfRange(low=1e3, high=1e2)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: ScaleOutOfRange(low=1000.0, high=100.0): low must lie below high.
    """

    name: ClassVar[str] = "scale_out_of_range"

    low: float = 1e2
    high: float = 1e6
    steps: int = 200

    def __post_init__(self) -> None:
        check_numbers(self, low=0, high=0)
        check_counts(self, steps=1)
        if self.low >= self.high:
            raise ConfigurationError(f"ScaleOutOfRange(low={self.low!r}, high={self.high!r}): low must lie below high.")

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts steps in fp16 out of the range."""
        scale = record.scale
        if scale == state.scale and not state.steps:
            return state, None
        if record.precision != "fp16" or not 0 < scale < math.inf:
            return state, None
        moves = state.moves or not (scale == state.scale or math.isnan(state.scale))
        if self.low <= scale <= self.high:
            return _State(scale, moves, 0, told=False, told_of_cap=False), None
        after = _State(scale, moves, state.steps + 1, state.told, state.told_of_cap)
        if moves and scale >= _CAP:
            return after._replace(told=True, told_of_cap=True), None if state.told_of_cap else self._cap_alert(record)
        if moves and after.steps >= self.steps:
            return after._replace(told=True), None if state.told else self._range_alert(after, record)
        return after, None

    def _cap_alert(self, record: StepRecord) -> Alert:
        return self.alert(
            record.step,
            message=f"The loss scale reached its cap, {amount(record.scale)}: the gradients are so small that scaling is doing nothing.",
            advice="Check that the loss depends on the parameters and is not multiplied by something tiny. If this is not meant to train "
            "in fp16, switch the scaler off: torch.amp.GradScaler(enabled=False). halfstep.LossScaler(max_scale=65536.0) has a ceiling.",
        )

    def _range_alert(self, state: _State, record: StepRecord) -> Alert:
        scale = record.scale
        if scale > self.high:
            return self.alert(
                record.step,
                message=f"The loss scale has been above {amount(self.high)} for {counted(state.steps, 'step')} and is {amount(scale)} now: "
                f"even multiplied by that, no gradient comes to {_LARGEST}, the largest number of fp16, so scaling is doing nothing.",
                advice="Check the weight of the loss: a mean over too much, or a tiny factor, makes all gradients tiny. If they are as "
                "they should be, halfstep.LossScaler(max_scale=65536.0) keeps the scale from growing further.",
            )
        return self.alert(
            record.step,
            message=f"The loss scale has been below {amount(self.low)} for {counted(state.steps, 'step')} and is {amount(scale)} now: "
            f"gradients below {_SMALLEST / scale:.2g} become zero in fp16.",
            advice="Find what keeps the scale down: `halfstep audit` names the operation with the least headroom; run it in fp32, take the "
            "mean of the loss instead of its sum, or train in bf16. A growth_interval below 2000 lets the scale rise sooner.",
        )
