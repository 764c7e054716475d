"""Steps that are only measured: correct loops stay correct, whichever of their steps are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep
from tests.watching.case import Case
from tests.watching.cases import CASES
from tests.watching.test_cases import alone, train

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")

# Libraries take long to start, and what is special about them is seen when each of their steps is looked at.
LOOPS = [case for case in CASES if case.correct and case.loop.__module__ != "tests.watching.cases_frameworks"]


@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_nothing_is_said_of_a_correct_loop_of_which_few_steps_are_looked_at(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere these loops are so short that all of their steps are looked at."""
    monkeypatch.setattr("halfstep.watching.scene._LOOKED_AT", 2)
    monkeypatch.setattr("halfstep.watching.scene._LOOK_EVERY", 3)
    expected = alone(case)
    arguments = case.before()
    with halfstep.watch(tmp_path, sinks=()) as seen:
        losses = train(case, arguments)
    assert {alert.rule for alert in seen.alerts} <= case.also, "\n".join(map(str, seen.alerts))
    assert repr(losses) == repr(expected)
