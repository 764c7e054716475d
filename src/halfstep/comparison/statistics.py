"""Medians and their intervals, without assuming a distribution: step times are skewed, and have outliers that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor
from statistics import median

from halfstep.records import Interval

__all__ = ["median_interval"]


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The median with the interval between two order statistics that covers the true median with at least the confidence asked for.

    The number of samples below the true median is binomial with p = 1/2, whatever the distribution (Hahn and Meeker, Statistical
    Intervals, section 5.2). Fewer than six samples cannot reach 95 %; the interval is then their whole range.

    Args:
        samples: At least one number.
        confidence: Between 0 and 1.

    Raises:
        ValueError: There are no samples.

    Example:
        >>> print(median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 100.0]))
        5.50 [2.00, 9.00]
    """
    if not samples:
        raise ValueError("A median needs at least one sample.")
    ordered = sorted(samples)
    count = len(ordered)
    # Cutting k samples off at each end leaves the probability that k or fewer fall on one side, twice, outside. Counted in whole numbers
    # of the 2**count equally likely cases: 0.5**count is zero, as a float, from 1075 samples on.
    allowed = floor(Fraction(1 - confidence) * 2**count)
    cut, ways = 0, count
    outside = 2 * (1 + ways)  # What cutting one more off would leave outside.
    while cut < (count - 1) // 2 and outside <= allowed:
        cut += 1
        ways = ways * (count - cut) // (cut + 1)  # The binomial coefficient of cut + 1.
        outside += 2 * ways
    return Interval(median=median(ordered), low=ordered[cut], high=ordered[count - 1 - cut])
