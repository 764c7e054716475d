"""Numbers as a reader wants them: in a fitting unit, with as many digits as mean something."""

# A multiplication sign and an en dash are what readers are shown here, on purpose.
# ruff: noqa: RUF001, RUF002

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from halfstep.records import Interval

__all__ = ["MISSING", "TIMES", "Unit", "interval_texts", "memory_unit", "number_text", "ratio_text", "time_unit"]

# What stands where a number would, if there were one.
MISSING = "–"

TIMES = "×"

# Beyond these a fixed-point number is longer than its scientific form, or loses its digits.
_SMALLEST_FIXED, _LARGEST_FIXED = 1e-4, 1e7


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit, and what a value in the record's own unit is multiplied with to be in it.

    Example:
        >>> Unit(name="s", factor=0.001).factor * 2500
        2.5
    """

    name: str
    factor: float


def _decimals(value: float, *, digits: int) -> int:
    """How many decimals show `digits` significant digits of a finite number."""
    if value == 0:
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _is_fixed(value: float) -> bool:
    """Whether a number is written without an exponent."""
    return value == 0 or _SMALLEST_FIXED <= abs(value) < _LARGEST_FIXED


def number_text(value: float | None, *, digits: int = 4) -> str:
    """A number with that many significant digits; an en dash for `None`, and `NaN` or `inf` for what is not finite.

    Args:
        value: The number.
        digits: The significant digits of a number with decimals; whole numbers are shown whole.

    Example:
        >>> [number_text(value) for value in (812.4449, 65536.0, 0.00001234, float("nan"), None)]
        ['812.4', '65536', '1.234e-05', 'NaN', '–']
    """
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if not _is_fixed(value):
        return f"{value:.{digits - 1}e}"
    return f"{value:.{_decimals(value, digits=digits)}f}"


def interval_texts(interval: Interval | None, *, factor: float = 1.0, digits: int = 4, suffix: str = "") -> tuple[str, str]:
    """A median and its interval, all three numbers with as many decimals as the median has.

    Args:
        interval: The interval.
        factor: What all three numbers are multiplied with.
        digits: The significant digits of the median.
        suffix: What follows the median directly, for example `×`.

    Example:
        >>> interval_texts(Interval(median=2.104, low=1.96, high=2.2), digits=3, suffix="×")
        ('2.10×', '[1.96, 2.20]')
        >>> interval_texts(None)
        ('–', '–')
    """
    if interval is None:
        return MISSING, MISSING
    median, low, high = (value * factor for value in (interval.median, interval.low, interval.high))
    if _is_fixed(median) and _is_fixed(low) and _is_fixed(high):
        decimals = _decimals(median, digits=digits)
        return f"{median:.{decimals}f}{suffix}", f"[{low:.{decimals}f}, {high:.{decimals}f}]"
    return f"{number_text(median, digits=digits)}{suffix}", f"[{number_text(low, digits=digits)}, {number_text(high, digits=digits)}]"


def ratio_text(ratio: float | None) -> str:
    """A ratio with its sign.

    Example:
        >>> ratio_text(0.6234), ratio_text(None)
        ('0.623×', '–')
    """
    text = number_text(ratio, digits=3)
    return f"{text}{TIMES}" if ratio is not None and math.isfinite(ratio) else text


def _typical(values: Iterable[float | None]) -> float:
    """The geometric mean of what is finite and positive, so that one huge value does not choose the unit; 1 when nothing is."""
    logs = [math.log(value) for value in values if value is not None and math.isfinite(value) and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def time_unit(milliseconds: Iterable[float | None]) -> Unit:
    """The unit in which these times are easiest to read together.

    Args:
        milliseconds: The times, in milliseconds.

    Example:
        >>> time_unit([0.2, 0.4]).name, time_unit([12.0, None]).name, time_unit([2500.0]).name
        ('µs', 'ms', 's')
    """
    typical = _typical(milliseconds)
    if typical < 1:
        return Unit(name="µs", factor=1000.0)
    return Unit(name="ms", factor=1.0) if typical < 1000 else Unit(name="s", factor=0.001)


def memory_unit(mebibytes: Iterable[float | None]) -> Unit:
    """The unit in which these sizes are easiest to read together.

    Args:
        mebibytes: The sizes, in MiB.

    Example:
        >>> memory_unit([0.01]).name, memory_unit([812.0, 512.0]).name, memory_unit([20480.0]).name
        ('KiB', 'MiB', 'GiB')
    """
    typical = _typical(mebibytes)
    if typical < 1:
        return Unit(name="KiB", factor=1024.0)
    return Unit(name="MiB", factor=1.0) if typical < 1024 else Unit(name="GiB", factor=1 / 1024)
