"""Medians and their intervals, without assuming a distribution: step times are skewed, and have outliers that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
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
    # Cutting k samples off at each end leaves the probability that k or fewer fall on one side, twice, outside.
    cut, outside = 0, 2 * 0.5**count
    while cut < (count - 1) // 2 and outside + 2 * comb(count, cut + 1) * 0.5**count <= 1 - confidence:
        cut += 1
        outside += 2 * comb(count, cut) * 0.5**count
    return Interval(median=median(ordered), low=ordered[cut], high=ordered[count - 1 - cut])
