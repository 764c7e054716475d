"""Memory grows and grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.records import Alert, StepRecord

__all__ = ["MemoryGrowth"]

_INFINITY: Final = math.inf
_MIB: Final = 2**20

# A window that adds less than this share is as good as level.
_NOISE: Final = 0.001


class _Windows(NamedTuple):
    first: float  # lowest memory of the first window since which each has more than the one before
    lows: tuple[float, ...]  # the same of the last windows
    grown: int  # how many windows there are of those
    told: bool


# How many steps of this window there are, the lowest memory in it, and what the windows before it said. A plain tuple is made in a third
# of a named one's time.
_State: TypeAlias = tuple[int, float, _Windows]

_START: Final[_State] = (0, math.inf, _Windows(first=math.nan, lows=(), grown=0, told=False))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth(AbstractRule):
    """Memory grows in window after window of steps, and does not level off.

    The least memory in each window is compared, so that what is allocated and freed again does not count.

    Attributes:
        window: So many steps make a window.
        windows: Memory has to grow in so many windows in a row.
        share: By more than this share in all.
        mebibytes: And by more than so many MiB in all.

    Example:
        >>> MemoryGrowth(share=0.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: MemoryGrowth(share=0.0): allowed is a finite number above 0.
    """

    name: ClassVar[str] = "memory_growth"

    window: int = 50
    windows: int = 10
    share: float = 0.1
    mebibytes: float = 64.0

    def __post_init__(self) -> None:
        check_counts(self, window=1, windows=2)
        check_numbers(self, share=0, mebibytes=0)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Finds the least memory of each window, and compares it with that of the one before."""
        memory = record.memory_bytes
        if memory is None or not 0 < memory < _INFINITY:
            return state, None
        seen, lowest, before = state
        seen += 1
        lowest = memory if memory < lowest else lowest  # min() takes as long as all the rest.
        return ((seen, lowest, before), None) if seen < self.window else self._compared(before, lowest, record)

    def _compared(self, before: _Windows, lowest: float, record: StepRecord) -> tuple[_State, Alert | None]:
        if not before.lows or lowest <= before.lows[-1] * (1 + _NOISE):
            return (0, math.inf, _Windows(first=lowest, lows=(lowest,), grown=0, told=False)), None
        lows, grown = (*before.lows, lowest)[-1 - self.windows :], before.grown + 1
        told = before.told or (grown >= self.windows and self._is_leak(before.first, lows, grown))
        after = _Windows(before.first, lows, grown, told)
        return (0, math.inf, after), self._alert(after, record) if told and not before.told else None

    def _is_leak(self, first: float, lows: tuple[float, ...], grown: int) -> bool:
        total = lows[-1] - first
        if total <= self.share * first or total <= self.mebibytes * _MIB:
            return False
        # What a run needs at its start grows less and less; a leak goes on as it began.
        half = self.windows // 2
        return (lows[-1] - lows[-1 - half]) / half >= total / grown / 2

    def _alert(self, state: _Windows, record: StepRecord) -> Alert:
        total, steps = state.lows[-1] - state.first, state.grown * self.window
        return self.alert(
            record.step,
            message=f"Memory grew in each of the last {state.grown} windows of {self.window} steps, from {state.first / _MIB:.0f} MiB to "
            f"{state.lows[-1] / _MIB:.0f} MiB (+{100 * total / state.first:.0f} %, {total / steps / _MIB:.2g} MiB a step): the run will "
            "end out of memory.",
            advice="Look for tensors that are kept with their graph: add up loss.item() or loss.detach() in place of loss, keep no outputs "
            "in lists, do without retain_graph=True. torch.cuda.memory._record_memory_history() shows who allocated them; on a CPU, "
            "torch.profiler.profile(profile_memory=True) does.",
        )
