from __future__ import annotations

import pytest

from halfstep.journal import Entry
from halfstep.report.runs.positions import alert_positions, counts_anew, step_positions
from tests.report import run_samples as samples

ANEW: list[Entry] = [
    samples.start(),
    *samples.steps(3),
    samples.alert(at=3),
    samples.start(),
    *samples.steps(2),
    samples.alert(at=2),
    samples.start(),
    *samples.steps(1),
    samples.alert(at=1),
]


@pytest.mark.parametrize(
    ("entries", "positions"),
    [
        ([samples.start(), *samples.steps(3)], [1, 2, 3]),
        ([samples.start(), *samples.steps(3), samples.start(), *samples.steps(2, first=3)], [1, 2, 3, 3, 4]),
        (ANEW, [1, 2, 3, 4, 5, 6]),
        ([samples.start(), samples.start(), *samples.steps(2), samples.start()], [1, 2]),
        # What went on from a checkpoint of a process that had counted anew goes on in its numbers.
        (
            [samples.start(), *samples.steps(3), samples.start(), *samples.steps(3), samples.start(), *samples.steps(1, first=3)],
            [1, 2, 3, 4, 5, 6, 6],
        ),
        ([samples.alert()], []),
    ],
)
def test_steps_stand_at_their_numbers_or_follow_those_before(entries: list[Entry], positions: list[int]) -> None:
    assert step_positions(samples.saved(entries)).tolist() == positions


def test_counting_anew_is_known() -> None:
    assert counts_anew(samples.saved(ANEW))
    assert not counts_anew(samples.saved([samples.start(), *samples.steps(3), samples.start(), *samples.steps(2, first=3)]))


def test_alerts_stand_at_the_steps_of_their_process() -> None:
    run = samples.saved(ANEW)
    assert alert_positions(run, run.alerts) == (3, 5, 6)
    # What only the second process alerted is in its steps, although the first one has such a step as well.
    run = samples.saved([samples.start(), *samples.steps(3), samples.start(), *samples.steps(2), samples.alert(at=2)])
    assert alert_positions(run, run.alerts) == (5,)


def test_alerts_of_a_later_judgement_stand_where_their_steps_can_be() -> None:
    run = samples.saved(ANEW)
    for steps, positions in {(3, 2, 1, 77): (3, 5, 6, 82), (2,): (2,), (2, 2): (2, 2), (2, 1): (2, 4), (): ()}.items():
        assert alert_positions(run, [samples.alert("rule", at) for at in steps]) == positions


def test_alerts_of_a_run_with_one_process_stand_at_their_steps() -> None:
    run = samples.saved([*samples.steps(3), samples.alert(at=2)])
    assert alert_positions(run, run.alerts) == (2,)
