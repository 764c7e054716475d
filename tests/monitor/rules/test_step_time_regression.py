from __future__ import annotations

import math
import random

import pytest

from halfstep.monitor.rules import StepTimeRegression
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = StepTimeRegression()
EARLY = [3.0, *[0.5] * 19, *[0.02] * 50]


def test_steps_that_become_slow_are_told_once() -> None:
    (alert,) = verdicts(RULE, each("step_time_s", [*EARLY, *[0.02] * 100, *[0.05] * 1000]))
    assert alert.step == 320
    assert "A step takes 50 ms, the median of the last 50 steps: 2.5 times the 20 ms that it took near the start" in alert.message
    assert "for 150 steps" in alert.message
    assert "loss.item()" in alert.advice


def test_seconds_are_told_as_such() -> None:
    (alert,) = verdicts(RULE, each("step_time_s", [*[1.0] * 70, *[2.345] * 150]))
    assert "A step takes 2.35 s" in alert.message
    assert "1 s that" in alert.message


def evaluated(step: int) -> float:
    return 30.0 if step % 5 == 0 else 0.02


@pytest.mark.parametrize(
    "times",
    [
        [*EARLY, *[0.03] * 500],
        [*EARLY, *([0.05] * 100 + [0.02] * 50) * 5],
        [evaluated(n) for n in range(1000)],
        [*[0.5] * 70, *[0.02] * 500],
        [*[0.001] * 20, *[0.02] * 500],
        [math.nan] * 500,
        [0.0] * 500,
        [*EARLY, *[math.inf, -1.0, 0.0, math.nan] * 200],
        [random.Random(1).lognormvariate(-4, 0.4) for _ in range(2000)],
    ],
    ids=["at the limit", "not for long", "evaluations", "faster", "quick warm-up", "unknown", "zero", "absurd", "noise"],
)
def test_no_alert(times: list[float]) -> None:
    assert steps_of(RULE, each("step_time_s", times)) == []


def test_skipped_steps_do_not_count() -> None:
    slow = [record(n, step_time_s=9.0, skipped=True) for n in range(100)]
    assert steps_of(RULE, [*slow, *each("step_time_s", EARLY), *slow, *slow]) == []


def test_a_window_that_is_well_below_arms_it_again() -> None:
    slow = [0.04] * 150
    assert steps_of(RULE, each("step_time_s", [*EARLY, *slow, *[0.028] * 50, *slow])) == [220]
    assert steps_of(RULE, each("step_time_s", [*EARLY, *slow, *[0.024] * 50, *slow])) == [220, 420]


def test_thresholds() -> None:
    rule = StepTimeRegression(warmup=0, window=2, ratio=3.0, windows=1)
    assert steps_of(rule, each("step_time_s", [1.0, 1.0, 3.0, 3.0, 3.1, 3.1])) == [6]
