"""What a diagnosis found, as a record."""

from __future__ import annotations

import pytest

from halfstep.records import CAUSES, Cause, Diagnosis, StuckTensor, VanishedGradients
from tests.report import diagnosis_samples as samples


def test_there_are_ten_causes() -> None:
    assert (len(CAUSES), CAUSES[0]) == (10, "healthy")


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("is_reproduced", [True, False])
def test_all_but_health_is_a_finding_and_so_is_a_step_that_fails_only_once(cause: Cause, is_reproduced: bool) -> None:
    finding = cause != "healthy" or not is_reproduced
    assert samples.diagnosis(cause, is_reproduced=is_reproduced).is_finding is finding


@pytest.mark.parametrize(("verified", "expected"), [((), False), ((False,), False), ((False, True), True)])
def test_one_remedy_that_holds_is_enough(verified: tuple[bool, ...], expected: bool) -> None:
    assert samples.diagnosis(remedies=tuple(samples.remedy(verified=each) for each in verified)).verified is expected


def test_shares() -> None:
    assert VanishedGradients(module="head", zeros=3, elements=12).share == 0.25
    assert VanishedGradients(module="head", zeros=0, elements=0).share == 0.0
    assert StuckTensor(name="head.weight", dtype="float16", stuck=9, elements=12).share == 0.75
    assert StuckTensor(name="head.weight", dtype="float16", stuck=0, elements=0).share == 0.0


def test_a_diagnosis_holds_all_that_is_in_it() -> None:
    full = samples.full_diagnosis()
    again = Diagnosis.from_json(full.to_json())
    assert again == full
    assert again.excerpt[2].is_marked
    assert again.evidence[0].origin == full.origin
