from __future__ import annotations

import pytest

from halfstep.monitor.rules import ScalerUnused
from tests.monitor.rules.streams import each, steps_of, verdicts

RULE = ScalerUnused(steps=20)


def test_twenty_steps_without_the_scaler_are_told_once() -> None:
    (alert,) = verdicts(RULE, each("scaler", ["unused"] * 100), ended=True)
    assert alert.step == 20
    assert "switched on, and 20 steps in a row passed it by: gradients are not scaled" in alert.message
    assert "scaler.scale(loss).backward()" in alert.advice


def test_in_another_precision_it_is_to_be_left_out() -> None:
    (alert,) = verdicts(RULE, each("scaler", ["unused"] * 20, precision="bf16"))
    assert "in bf16 it is not needed" in alert.message
    assert "GradScaler(enabled=False)" in alert.advice


@pytest.mark.parametrize(("steps", "text"), [(1, "the only step passed"), (7, "7 steps in a row passed")])
def test_a_short_run_is_told_at_its_end(steps: int, text: str) -> None:
    (alert,) = verdicts(RULE, each("scaler", ["unused"] * steps, optimizer="G"), ended=True)
    assert alert.step == steps
    assert alert.message.startswith("Optimizer G: ")
    assert text in alert.message


@pytest.mark.parametrize(
    "uses",
    [["used"] * 50, ["none"] * 50, [None] * 50, [*["unused"] * 19, "used"] * 5, ["used", *["unused"] * 19], [*["unused"] * 5, "none"], []],
    ids=["used", "none", "unknown", "used at times", "used at first", "gone", "no step"],
)
def test_no_alert(uses: list[str | None]) -> None:
    assert verdicts(RULE, each("scaler", uses), ended=True) == []


def test_what_is_not_known_is_passed_over() -> None:
    assert steps_of(RULE, each("scaler", [*["unused"] * 19, None, "unused"])) == [21]


def test_a_step_with_it_arms_it_again() -> None:
    assert steps_of(RULE, each("scaler", [*["unused"] * 25, "used", *["unused"] * 25])) == [20, 46]


def test_thresholds() -> None:
    assert steps_of(ScalerUnused(steps=2), each("scaler", ["unused"] * 5)) == [2]
