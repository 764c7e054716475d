"""What a policy does, as a record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfstep.records import SCHEMA, Comparison, OverrideEffect, PolicyEffect
from tests import samples


def override(status: Any) -> OverrideEffect:
    return samples.override_effect("head=fp32", status=status)


@pytest.mark.parametrize(
    ("status", "finding"), [("effective", False), ("absent", False), ("unmatched", True), ("overruled", True), ("uncalled", True)]
)
def test_an_override_that_does_nothing_is_a_finding_unless_its_class_is_absent(status: str, finding: bool) -> None:
    assert override(status).is_finding is finding
    effect = samples.policy_effect(overrides=(override("effective"), override(status)))
    assert effect.findings == ((override(status),) if finding else ())


def test_a_comparison_from_before_there_were_policies_can_be_read() -> None:
    plain = json.loads(samples.comparison().to_json())
    del plain["policies"]
    assert plain["schema"] == SCHEMA
    assert Comparison.from_json(json.dumps(plain)) == samples.comparison()


def test_a_comparison_holds_what_its_policies_do() -> None:
    comparison = samples.comparison(policies=(samples.policy_effect(),))
    again = Comparison.from_json(comparison.to_json())
    assert again.policies == (samples.policy_effect(),)
    assert PolicyEffect.from_json(samples.policy_effect().to_json()) == again.policies[0]
