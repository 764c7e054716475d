from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.monitor.rules import NonfiniteLoss
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = NonfiniteLoss()
FINITE = each("loss", [0.5] * 5)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.inf, None), (-math.inf, 1.0), (math.nan, None), (math.nan, math.nan), (math.nan, math.inf), (math.inf, math.inf)],
)
def test_a_step_that_was_taken_with_such_a_loss_is_told_at_once(loss: float, norm: float | None) -> None:
    (alert,) = verdicts(RULE, [*FINITE, *[record(n, loss=loss, grad_norm=norm) for n in range(6, 30)]])
    assert (alert.step, alert.severity) == (6, "error")
    assert f"The loss is {'NaN' if math.isnan(loss) else loss}" in alert.message
    assert ("gradient norm" in alert.message) is (norm is not None)
    assert "halfstep diagnose" in alert.advice


def test_three_skipped_steps_in_a_row_are_told() -> None:
    (alert,) = verdicts(RULE, [*FINITE, *each("loss", [math.inf] * 9, skipped=True, grad_norm=None)])
    assert alert.step == 3
    assert "inf and was not finite in 3 skipped steps in a row" in alert.message


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": math.nan, "grad_norm": 1.0},
        {"loss": math.inf, "skipped": True},
        {"loss": math.nan, "skipped": True},
        {"loss": math.nan, "skipped": True, "grad_norm": math.inf},
    ],
    ids=["unknown", "inf and skipped", "nan and skipped", "overflow"],
)
def test_a_scaler_handles_a_step_or_two(changes: dict[str, Any]) -> None:
    assert steps_of(RULE, [*FINITE, record(6, **changes), record(7, **changes), *FINITE, record(13, **changes)]) == []


@pytest.mark.parametrize("norm", [None, 1.0, 0.0])
def test_a_loss_that_nobody_knows_is_no_finding(norm: float | None) -> None:
    assert steps_of(RULE, each("loss", [math.nan] * 50, grad_norm=norm)) == []
    assert steps_of(RULE, each("loss", [math.nan] * 50, grad_norm=math.inf, skipped=True)) == []


def test_a_loss_that_is_unknown_at_times_is_no_finding() -> None:
    assert steps_of(RULE, each("loss", [0.5, math.nan] * 50, grad_norm=1.0)) == []


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_tell_a_loss_that_was_never_finite(norm: float) -> None:
    assert steps_of(RULE, each("loss", [math.nan] * 50, grad_norm=norm)) == [1]


def test_ten_finite_losses_arm_it_again() -> None:
    assert steps_of(RULE, each("loss", [math.inf, *[0.5] * 9, math.inf])) == [1]
    assert steps_of(RULE, each("loss", [math.inf, *[0.5] * 10, math.inf])) == [1, 12]
    assert steps_of(RULE, each("loss", [math.inf, *[0.5] * 5, math.inf, *[0.5] * 9, math.inf])) == [1]


def test_a_step_that_is_taken_with_such_a_loss_ends_a_row_of_skips() -> None:
    unknown = record(2, loss=math.nan, grad_norm=1.0)
    skipped = record(3, loss=math.inf, skipped=True)
    assert steps_of(RULE, [skipped, skipped, unknown, record(4), skipped, skipped]) == []


def test_thresholds() -> None:
    assert steps_of(NonfiniteLoss(skips=1), [record(1, loss=math.inf, skipped=True)]) == [1]
    assert steps_of(NonfiniteLoss(recovery=1), each("loss", [math.inf, 0.5, math.inf])) == [1, 3]
