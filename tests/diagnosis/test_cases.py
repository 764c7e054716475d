"""Diagnoses of training that goes wrong in ways that people meet, and of training that only looks so."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep
from halfstep.records import CAUSES
from tests.diagnosis.case import Case, marked_line
from tests.diagnosis.cases import CASES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_diagnosis_names_the_cause_and_the_line(case: Case) -> None:
    diagnosis = halfstep.diagnose(
        case.task,
        precision=case.precision,
        target=case.target,
        max_steps=case.max_steps,
        loss_scale=case.loss_scale,
        device="cpu",
    )
    assert diagnosis.cause == case.cause, diagnosis
    origin = diagnosis.origin
    assert origin is not None or (case.op, case.module, case.marker) == (None, None, None), diagnosis
    if origin is not None and case.op is not None:
        assert origin.op == case.op, diagnosis
    if origin is not None and case.module is not None:
        assert origin.site.module == case.module, diagnosis
    if origin is not None and case.marker is not None:
        assert (Path(origin.site.file).name, origin.site.line) == marked_line(case.marker), diagnosis
    if case.verified is not None:
        assert diagnosis.verified is case.verified, diagnosis


def test_each_cause_has_a_case() -> None:
    assert {case.cause for case in CASES} == set(CAUSES)


def test_cases_have_names_of_their_own() -> None:
    names = [str(case) for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("marker", sorted({case.marker for case in CASES if case.marker is not None}))
def test_a_marker_stands_at_one_line(marker: str) -> None:
    _, number = marked_line(marker)
    assert number > 0
