"""The loss scale falls by orders of magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount
from halfstep.records import Alert, StepRecord

__all__ = ["ScaleCollapse"]


class _State(NamedTuple):
    seen: int
    scale: float  # of the last step
    fell: int  # when it fell last
    stable: bool  # whether it has found its place
    falls: tuple[tuple[int, float], ...]  # when it fell since, and from what


_START: Final = _State(seen=0, scale=math.nan, fell=0, stable=False, falls=())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCollapse(AbstractRule):
    """The loss scale falls by orders of magnitude, after it had found its place.

    Attributes:
        factor: A fall by so much or more is a collapse.
        steps: It counts if it takes so many steps or fewer.
        stable_steps: A scale has found its place once it has not fallen for so many steps. A fall before that looks for it.

    Example:
        >>> ScaleCollapse(factor=1.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: ScaleCollapse(factor=1.0): allowed is a finite number above 1.
    """

    name: ClassVar[str] = "scale_collapse"

    factor: float = 2.0**10
    steps: int = 100
    stable_steps: int = 100

    def __post_init__(self) -> None:
        check_numbers(self, factor=1)
        check_counts(self, steps=1, stable_steps=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Adds up falls; after a collapse, the scale has to find its place again."""
        scale = record.scale
        if (scale == state.scale and state.stable and not state.falls) or not 0 < scale < math.inf:
            return state, None
        seen, falls = state.seen + 1, state.falls
        if falls and falls[0][0] <= seen - self.steps:
            falls = falls[1:]
        stable = state.stable or seen - state.fell > self.stable_steps
        if not scale < state.scale:
            return _State(seen, scale, state.fell, stable, falls), None
        if not stable:
            return _State(seen, scale, seen, stable=False, falls=()), None
        falls = (*falls, (seen, state.scale))
        top = max(before for _, before in falls)
        if top / scale < self.factor:
            return _State(seen, scale, seen, stable=True, falls=falls), None
        return _State(seen, scale, seen, stable=False, falls=()), self._alert(record, top)

    def _alert(self, record: StepRecord, top: float) -> Alert:
        return self.alert(
            record.step,
            message=f"The loss scale fell from {amount(top)} to {amount(record.scale)}, by a factor of {amount(top / record.scale)}, "
            f"within {self.steps} steps, after it had been stable: gradients, or what they are computed from, have become much larger.",
            advice="Look at the loss and the gradient norm just before: a learning rate that is too high, a bad batch, or weights that "
            "grow without bound. `halfstep diagnose` finds the operation that overflows. Keep a checkpoint from before the fall.",
        )
