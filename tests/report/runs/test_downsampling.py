from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halfstep.report.runs.downsampling import Floats, kept_places, marked_places, medians

values = arrays.arrays(np.float64, st.integers(0, 300), elements=st.floats(width=64))
finite_values = arrays.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6))
buckets = st.integers(1, 40)


def chunks(series: Floats, count: int) -> list[slice]:
    """The buckets: equally many neighbours in each but the last."""
    size = max(1, -(-len(series) // count))
    return [slice(first, min(first + size, len(series))) for first in range(0, len(series), size)]


class TestKeptPlaces:
    @given(values, buckets)
    def test_the_lowest_and_the_highest_of_every_bucket_are_kept(self, series: Floats, count: int) -> None:
        kept = set(kept_places(series, buckets=count).tolist())
        for chunk in chunks(series, count):
            finite = series[chunk][np.isfinite(series[chunk])]
            shown = [series[place] for place in range(chunk.start, chunk.stop) if place in kept]
            if len(finite):
                assert finite.min() in shown
                assert finite.max() in shown

    @given(values, buckets)
    def test_a_bucket_with_a_value_that_is_not_finite_keeps_one(self, series: Floats, count: int) -> None:
        kept = kept_places(series, buckets=count)
        for chunk in chunks(series, count):
            inside = kept[(kept >= chunk.start) & (kept < chunk.stop)]
            assert np.isfinite(series[inside]).all() == np.isfinite(series[chunk]).all()

    @given(values, buckets)
    def test_the_order_the_first_and_the_last_are_kept(self, series: Floats, count: int) -> None:
        kept = kept_places(series, buckets=count)
        assert (np.diff(kept) > 0).all()
        if len(series):
            assert (kept[0], kept[-1]) == (0, len(series) - 1)

    @given(values, buckets)
    def test_few_are_kept_and_a_short_series_is_unchanged(self, series: Floats, count: int) -> None:
        kept = kept_places(series, buckets=count)
        assert len(kept) <= 3 * count + 2
        if len(series) <= 2 * count:
            assert kept.tolist() == list(range(len(series)))

    @given(st.integers(1, 5000), st.data())
    def test_a_lone_spike_is_kept(self, length: int, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, length - 1))
        series = np.zeros(length)
        series[place] = data.draw(st.sampled_from([1.0, -1.0, np.nan, np.inf]))
        assert place in kept_places(series, buckets=10)

    def test_a_million_values_become_two_thousand(self) -> None:
        series = np.random.default_rng(0).normal(size=1_000_000)
        assert 1900 < len(kept_places(series, buckets=1000)) <= 2002


class TestMedians:
    @given(finite_values, buckets)
    def test_they_are_those_of_the_buckets(self, series: Floats, count: int) -> None:
        positions, middles = medians(np.arange(len(series), dtype=np.float64), series, buckets=count)
        parts = chunks(series, count)
        assert middles.tolist() == [np.median(series[chunk]) for chunk in parts]
        assert positions.tolist() == [(chunk.start + chunk.stop - 1) / 2 for chunk in parts]

    def test_what_is_not_finite_does_not_count_and_a_bucket_of_it_is_a_gap(self) -> None:
        series = np.array([1.0, np.inf, 3.0, np.nan, np.nan, np.inf, 5.0, 7.0, np.nan])
        positions, middles = medians(np.arange(9.0), series, buckets=3)
        assert positions.tolist() == [1.0, 4.0, 7.0]
        assert middles.tolist() == pytest.approx([2.0, np.nan, 6.0], nan_ok=True)

    def test_of_nothing_there_are_none(self) -> None:
        positions, middles = medians(np.zeros(0), np.zeros(0), buckets=3)
        assert (len(positions), len(middles)) == (0, 0)


class TestMarkedPlaces:
    @given(arrays.arrays(np.bool_, st.integers(0, 300)), buckets)
    def test_every_event_is_told_by_a_mark_in_its_bucket(self, is_marked: np.ndarray, count: int) -> None:
        places, counts = marked_places(is_marked, buckets=count)
        for chunk in chunks(is_marked, count):
            inside = (places >= chunk.start) & (places < chunk.stop)
            events = np.flatnonzero(is_marked[chunk]) + chunk.start
            assert places[inside].tolist() == events[:1].tolist()
            assert counts[inside].tolist() == ([len(events)] if len(events) else [])

    @given(st.integers(0, 999_999))
    def test_a_lone_event_in_a_million_is_marked_where_it_is(self, place: int) -> None:
        is_marked = np.zeros(1_000_000, dtype=np.bool_)
        is_marked[place] = True
        places, counts = marked_places(is_marked, buckets=1000)
        assert (places.tolist(), counts.tolist()) == ([place], [1])
