from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import PersistentSkipsError
from halfstep.scaler.counts import SkipCounts, Verdict, too_many_skips
from tests.scaler.loops import HostReads


def verdict(*, bad: bool, on_device: bool, stepped: bool = True) -> Verdict:
    found = torch.full((), float(bad))
    return Verdict([], found, stepped=stepped, skipped=None if on_device or not stepped else bad)


class Reference:
    """The same counts, kept in the plainest way."""

    def __init__(self) -> None:
        self.steps = self.skips = self.consecutive = 0

    def add(self, verdicts: list[tuple[bool, bool]]) -> None:
        self.steps += sum(stepped for _, stepped in verdicts)
        self.skips += sum(bad and stepped for bad, stepped in verdicts)
        if verdicts:
            self.consecutive = self.consecutive + 1 if any(bad for bad, _ in verdicts) else 0

    def values(self) -> tuple[int, int, int]:
        return self.steps, self.skips, self.consecutive


OPTIMIZERS = st.tuples(st.booleans(), st.booleans(), st.booleans())
UPDATES = st.lists(st.lists(OPTIMIZERS, max_size=3), max_size=40)


@given(updates=UPDATES, limit=st.none() | st.integers(1, 6), reads=st.sets(st.integers(0, 40)))
def test_counts_are_exact_wherever_they_are_kept(updates: list[list[tuple[bool, bool, bool]]], limit: int | None, reads: set[int]) -> None:
    counts, reference = SkipCounts(limit=limit), Reference()
    for number, update in enumerate(updates):
        reached = counts.add([verdict(bad=bad, on_device=on_device, stepped=stepped) for bad, on_device, stepped in update])
        reference.add([(bad, stepped) for bad, _, stepped in update])
        if update:
            assert reached == (reference.consecutive if limit is not None and reference.consecutive >= limit else None)
        if number in reads:
            assert counts.read() == reference.values()
    assert counts.read() == reference.values()


@pytest.mark.parametrize("on_device", [False, True])
def test_counting_goes_on_from_where_it_stopped(on_device: bool) -> None:
    counts = SkipCounts(limit=5, steps=100, skips=40, consecutive=3)
    assert counts.add([verdict(bad=True, on_device=on_device)]) is None
    assert counts.add([verdict(bad=True, on_device=on_device)]) == 5
    assert counts.read() == (102, 42, 5)


@pytest.mark.parametrize("on_device", [False, True])
def test_the_limit_is_told_again_until_a_good_update(on_device: bool) -> None:
    counts = SkipCounts(limit=2)
    told = [counts.add([verdict(bad=bad, on_device=on_device)]) for bad in (True, True, True, False, True, True)]
    assert told == [None, 2, 3, None, None, 2]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_without_gradients_is_no_end_to_skips_in_a_row(on_device: bool) -> None:
    counts = SkipCounts(limit=2)
    counts.add([verdict(bad=True, on_device=on_device)])
    assert counts.add([Verdict([], None, stepped=True, skipped=False)]) is None
    assert counts.add([verdict(bad=True, on_device=on_device)]) == 2
    assert counts.read() == (3, 2, 2)


@pytest.mark.parametrize("limit", [10, 100])
def test_a_healthy_run_is_looked_at_once_in_so_many_updates_as_the_limit(limit: int) -> None:
    counts = SkipCounts(limit=limit)
    with HostReads() as reads:
        for _ in range(3 * limit):
            counts.add([verdict(bad=False, on_device=True)])
    assert reads.total == 3


def test_without_a_limit_the_device_is_never_read() -> None:
    counts = SkipCounts()
    with HostReads() as reads:
        for bad in (False, True) * 50:
            counts.add([verdict(bad=bad, on_device=True)])
        assert reads.total == 0
        assert counts.read() == (100, 50, 1)
        assert reads.total == 1


def test_the_verdict_stays_as_it_is() -> None:
    found = torch.ones(())
    counts = SkipCounts()
    for _ in range(3):
        counts.add([Verdict([], found, stepped=True)])
    assert found.item() == 1.0
    assert counts.read() == (3, 3, 3)


def test_values_that_were_read_already_are_not_read_again() -> None:
    counts = SkipCounts()
    assert counts.tensors() == []
    counts.add([verdict(bad=True, on_device=True)])
    values = [tensor.item() for tensor in counts.tensors()]
    with HostReads() as reads:
        assert counts.read(values) == (1, 1, 1)
    assert reads.total == 0


def test_the_error_says_how_many_at_which_scale_and_what_to_do() -> None:
    with pytest.raises(
        PersistentSkipsError, match=r"^7 steps in a row .*max_consecutive_skips=5.* scale is now 0\.5\. .*halfstep diagnose"
    ):
        raise too_many_skips(7, limit=5, scale=0.5)
