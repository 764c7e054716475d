"""How a report on runs says numbers, steps and times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

__all__ = ["count_text", "duration_text", "listed", "share_text", "steps_text", "time_text"]

_MOST_STEPS: Final = 5


def count_text(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count_text(1, "alert"), count_text(41200, "step")
        ('1 alert', '41,200 steps')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def share_text(part: int, whole: int) -> str:
    """A share in percent, never rounded to nothing or to all where it is neither; empty where there is no whole.

    Example:
        >>> share_text(37, 41200), share_text(1, 4), share_text(1, 10**6), share_text(9999, 10000), share_text(0, 7)
        ('0.09 %', '25 %', '0.0001 %', 'over 99 %', '0 %')
    """
    if not whole:
        return ""
    percent = 100 * part / whole
    if 99 < percent < 100:
        return "over 99 %"
    return f"{percent:.0f} %" if percent >= 10 or not part else f"{float(f'{percent:.1g}'):f}".rstrip("0").rstrip(".") + " %"


def steps_text(steps: Sequence[int]) -> str:
    """The numbers of some steps in words; of many, the first few and the last.

    Example:
        >>> steps_text([40]), steps_text([40, 80, 1200]), steps_text(range(1, 9))
        ('step 40', 'steps 40, 80 and 1,200', 'steps 1, 2, 3, 4, … 8')
    """
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if len(steps) <= _MOST_STEPS:
        return f"steps {listed([f'{step:,}' for step in steps])}"
    return f"steps {', '.join(f'{step:,}' for step in steps[: _MOST_STEPS - 1])}, … {steps[-1]:,}"


def listed(words: Sequence[str]) -> str:
    """Words with commas between them, and `and` before the last.

    Example:
        >>> listed(["a", "b", "c"]), listed(["a"])
        ('a, b and c', 'a')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def time_text(time: str) -> str:
    """A time as people write it; as it stands where it is no ISO 8601.

    Example:
        >>> time_text("2026-01-31T12:00:05+00:00"), time_text("noon")
        ('2026-01-31 12:00:05 UTC', 'noon')
    """
    try:
        read = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{read:%Y-%m-%d %H:%M:%S} {read:%Z}".rstrip()


def duration_text(first: str, last: str) -> str:
    """How long it is from one time to another; empty where one of them is no ISO 8601, or the last is earlier.

    Example:
        >>> duration_text("2026-01-31T12:00:00+00:00", "2026-01-31T15:12:40+00:00"), duration_text("2026-01-31T12:00:00+00:00", "noon")
        ('3 h 13 min', '')
    """
    try:
        seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):
        return ""
    if seconds < 0:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"
