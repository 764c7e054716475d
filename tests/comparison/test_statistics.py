from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import comb
from random import Random
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.statistics import median_interval

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=80)


def coverage(count: int, cut: int) -> float:
    """The probability, exactly, that the interval without `cut` samples at each end holds the true median."""
    outside: int = 2 * sum(comb(count, below) for below in range(cut + 1))
    return 1 - outside / float(2**count)


def cut_of(count: int, confidence: float = 0.95) -> int:
    """How many samples the interval leaves out at its lower end; those of 0, 1, 2, ... are their own ranks."""
    interval = median_interval(list(range(count)), confidence=confidence)
    assert interval.low + interval.high == count - 1, "as many are left out above as below"
    return int(interval.low)


@given(st.integers(6, 400), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_the_narrowest_that_covers_often_enough(count: int, confidence: float) -> None:
    cut = cut_of(count, confidence)
    whole_range_is_enough = coverage(count, 0) >= confidence
    assert coverage(count, cut) >= confidence - 1e-12 or (cut == 0 and not whole_range_is_enough)
    if cut + 1 <= (count - 1) // 2:
        assert coverage(count, cut + 1) < confidence + 1e-12


@pytest.mark.parametrize(("count", "cut"), [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (36, 11), (60, 21), (100, 39)])
def test_the_ranks_are_those_of_the_published_tables(count: int, cut: int) -> None:
    assert cut_of(count) == cut


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_samples_give_their_whole_range(count: int) -> None:
    interval = median_interval([3.0**power for power in range(count)])
    assert (interval.low, interval.high) == (1.0, 3.0 ** (count - 1))
    assert interval.median == median([3.0**power for power in range(count)])


def test_thousands_of_samples_are_counted_exactly() -> None:
    # 0.5**2000 is zero as a float, and the binomial coefficients overflow one.
    assert cut_of(2000) == 955
    assert cut_of(1075) in range(500, 510)


def test_the_interval_covers_the_true_median_of_skewed_distributions() -> None:
    source = np.random.default_rng(20240607)
    draws: dict[str, tuple[Callable[[tuple[int, int]], np.ndarray[Any, Any]], float]] = {
        "exponential": (lambda shape: source.exponential(size=shape), float(np.log(2))),
        "lognormal": (lambda shape: source.lognormal(sigma=1.5, size=shape), 1.0),
        "pareto": (lambda shape: source.pareto(1.1, size=shape), 2 ** (1 / 1.1) - 1),
    }
    trials, covered, total = 400, 0, 0
    for draw, true in draws.values():
        for count in (6, 7, 9, 13, 24, 36, 60):
            intervals = [median_interval(row) for row in draw((trials, count)).tolist()]
            here = sum(interval.low <= true <= interval.high for interval in intervals)
            assert here / trials >= 0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5
            covered, total = covered + here, total + trials
    assert covered / total >= 0.95


@given(numbers)
def test_the_interval_contains_the_median_and_stays_in_the_range(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert interval.low <= interval.median <= interval.high
    assert min(samples) <= interval.low
    assert interval.high <= max(samples)
    assert interval.median == median(samples)


@given(numbers, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(samples: list[float], source: Random) -> None:
    shuffled = list(samples)
    source.shuffle(shuffled)
    assert median_interval(shuffled) == median_interval(samples)


def test_ties_are_no_trouble() -> None:
    interval = median_interval([2.0] * 30 + [1.0, 5.0])
    assert (interval.low, interval.median, interval.high) == (2.0, 2.0, 2.0)


def test_more_confidence_never_makes_the_interval_narrower() -> None:
    samples = [float(rank**2) for rank in range(50)]
    intervals = [median_interval(samples, confidence=confidence) for confidence in (0.5, 0.8, 0.95, 0.999)]
    assert all(wide.low <= narrow.low and wide.high >= narrow.high for narrow, wide in pairwise(intervals))


def test_no_samples_have_no_median() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])
