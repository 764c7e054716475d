"""Loops that halfstep does not own: what is wrong in them is named at its line, and nothing is said of those that are right."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.randomness import seed_everything
from halfstep.records import UNKNOWN
from tests.watching.case import RULES, Case
from tests.watching.cases import CASES

pytestmark = pytest.mark.usefixtures("few_objects", "one_thread")


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """A watch looks for scalers among all objects there are: those of the libraries need not be looked at again for each case."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def train(case: Case, arguments: tuple[Any, ...]) -> list[float]:
    """Runs a loop as its case says that it ends."""
    losses: list[float] = []
    seed_everything(0)
    ending = pytest.raises(case.raises, match=case.match) if case.raises else nullcontext()
    with warnings.catch_warnings(), ending:
        for pattern in case.ignores:
            warnings.filterwarnings("ignore", message=pattern)
        losses += case.loop(*arguments)
    return losses


@cache
def alone(case: Case) -> list[float]:
    """The losses of a loop that nobody watches."""
    return train(case, case.before())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_watch_names_what_is_wrong_at_its_line_and_nothing_else(case: Case, tmp_path: Path) -> None:
    expected = alone(case)
    arguments = case.before()
    with halfstep.watch(tmp_path, sinks=()) as seen:
        losses = train(case, arguments)
    text = "\n".join(map(str, seen.alerts)) or "no alert"
    sites = [(alert.rule, alert.site) for alert in seen.alerts if alert.site is not None and alert.site.file != UNKNOWN]
    named = {(rule, Path(site.file).name, site.line) for rule, site in sites}
    demanded = {(mark.rule, mark.file, mark.line) for mark in case.marks}
    assert named | demanded == named, text
    assert {rule for rule, _, _ in named - demanded} <= case.also, text
    assert {alert.rule for alert in seen.alerts if alert.site is None or alert.site.file == UNKNOWN} <= case.also, text
    modules = {(rule, site.module) for rule, site in sites}
    assert {(mark.rule, mark.module) for mark in case.marks if mark.module is not None} <= modules, text
    assert repr(losses) == repr(expected)  # it trains as if nobody watched; as text, since NaN is no number to compare


@pytest.mark.parametrize("case", [case for case in CASES if case.correct], ids=str)
def test_a_correct_loop_trains(case: Case) -> None:
    losses = alone(case)
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_two_cases(rule: str) -> None:
    assert len([case for case in CASES if rule in {mark.rule for mark in case.marks}]) >= 2


def test_many_cases_are_correct() -> None:
    assert sum(case.correct for case in CASES) >= 35


def test_marks_name_rules() -> None:
    assert {mark.rule for case in CASES for mark in case.marks} == set(RULES)


def test_each_mark_belongs_to_a_case() -> None:
    """A mark in a function that no case lists would demand nothing."""
    written = {
        (file.name, number)
        for file in Path(__file__).parent.glob("cases_*.py")
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1)
        if "# alert: " in line
    }
    assert written == {(mark.file, mark.line) for case in CASES for mark in case.marks}


def test_cases_have_names_of_their_own() -> None:
    names = [case.loop.__name__ for case in CASES]
    assert sorted(set(names)) == sorted(names)
