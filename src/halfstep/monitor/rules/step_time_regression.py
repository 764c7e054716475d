"""Steps take longer than they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, StepRecord

__all__ = ["StepTimeRegression"]

_INFINITY: Final = math.inf


class _Windows(NamedTuple):
    early: float  # the median that is compared with; NaN until there is one
    slow: int  # windows in a row
    told: bool


# The seconds of the steps of this window, and what the windows before it said. A plain tuple is made in a third of a named one's time.
_State: TypeAlias = tuple[tuple[float, ...], _Windows]

_START: Final[_State] = ((), _Windows(early=math.nan, slow=0, told=False))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRegression(AbstractRule):
    """Steps take much longer than they did, and go on doing so.

    Medians of windows are compared, so that an evaluation or a checkpoint now and then does not count. Neither do skipped steps.

    Attributes:
        warmup: So many steps at the start are not looked at.
        window: So many steps make a window; the first one after `warmup` is what the others are compared with.
        ratio: A window is slow if its median is more than so many times that of the first.
        windows: So many slow windows in a row are told.
        milliseconds: And by so much at least, since the shortest steps are slowed down by anything else that runs on a machine.

    Example:
        >>> StepTimeRegression(ratio=1.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: StepTimeRegression(ratio=1.0): allowed is a finite number above 1.
    """

    name: ClassVar[str] = "step_time_regression"

    warmup: int = 20
    window: int = 50
    ratio: float = 1.5
    windows: int = 3
    milliseconds: float = 2.0

    def __post_init__(self) -> None:
        check_counts(self, warmup=0, window=1, windows=1)
        check_numbers(self, ratio=1, milliseconds=0)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Collects times, and compares a window when it is full."""
        seconds = record.step_time_s
        if record.skipped or not 0 < seconds < _INFINITY:
            return state, None
        recent, before = state
        recent += (seconds,)
        if len(recent) < self.window:
            return (recent, before), None
        if not math.isnan(before.early):
            return self._compared(before, _median(recent), record)
        if len(recent) < self.warmup + self.window:
            return (recent, before), None
        return ((), before._replace(early=_median(recent[self.warmup :]))), None

    def _compared(self, before: _Windows, median: float, record: StepRecord) -> tuple[_State, Alert | None]:
        ratio = median / before.early
        if ratio <= self.ratio or 1000 * (median - before.early) <= self.milliseconds:
            # Only a window that is well below counts as a recovery: a run that stays near the limit is told once.
            return ((), before._replace(slow=0, told=before.told and ratio > (1 + self.ratio) / 2)), None
        slow = before.slow + 1
        told = before.told or slow >= self.windows
        alert = self._alert(before.early, median, record) if told and not before.told else None
        return ((), before._replace(slow=slow, told=told)), alert

    def _alert(self, early: float, median: float, record: StepRecord) -> Alert:
        return self.alert(
            record.step,
            message=f"{prefix(record.optimizer)}A step takes {_time(median)}, the median of the last {self.window} steps: "
            f"{median / early:.2g} times the {_time(early)} that it took near the start, and so for {self.windows * self.window} steps.",
            advice="Look for what grows with time: a list of losses that still have their graph (append loss.item()), hooks that are "
            "registered again in each epoch, torch.compile that compiles again (TORCH_LOGS=recompiles), data that is read more slowly "
            "(DataLoader(num_workers=...)), or a device that throttles (nvidia-smi -q -d PERFORMANCE). torch.profiler shows where the time "
            "goes.",
        )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{amount(float(f'{1000 * seconds:.3g}'))} ms"
