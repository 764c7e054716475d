from __future__ import annotations

import math

import pytest

from halfstep.monitor.rules import VanishingGradients
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = VanishingGradients()
EARLY = [2.0] * 20


def test_gradients_that_are_zero_are_told_once() -> None:
    (alert,) = verdicts(RULE, each("grad_norm", [*EARLY, *[0.0] * 100]))
    assert alert.step == 40
    assert "was 0 in 20 steps in a row that were taken, where the median of the first 20 was 2:" in alert.message
    assert "loss scale (65536)" in alert.advice


def test_so_are_those_that_are_next_to_zero() -> None:
    (alert,) = verdicts(RULE, each("grad_norm", [*EARLY, *[1e-7, 2e-7] * 50], precision="bf16"))
    assert "was at most 2e-07 in" in alert.message
    assert "scale" not in alert.advice


def test_gradients_that_were_zero_from_the_start() -> None:
    (alert,) = verdicts(RULE, each("grad_norm", [0.0] * 50))
    assert alert.step == 20
    assert "median" not in alert.message


@pytest.mark.parametrize(
    "norms",
    [
        [*EARLY, *[0.0] * 19, 1.0],
        [*EARLY, *[2.1e-7] * 50],
        [*[1e-9] * 50],
        [*EARLY, *[math.nan] * 50],
        [*EARLY, *[-1.0] * 50],
        [None] * 50,
        [*[0.0] * 19, *[None, math.nan] * 20],
        [math.inf] * 50,
        [*[1e6] * 9, *[1.0] * 50],
    ],
    ids=["short", "just above", "always small", "nan", "absurd", "unknown", "unknown later", "inf", "a few large ones"],
)
def test_no_alert(norms: list[float | None]) -> None:
    assert steps_of(RULE, each("grad_norm", norms)) == []


def test_skipped_steps_do_not_count() -> None:
    assert steps_of(RULE, each("grad_norm", [0.0] * 50, skipped=True)) == []
    mixed = [one for n in range(30) for one in (record(n, grad_norm=0.0), record(n, grad_norm=math.inf, skipped=True))]
    assert steps_of(RULE, mixed) == [19]


def test_a_gradient_arms_it_again() -> None:
    assert steps_of(RULE, each("grad_norm", [*EARLY, *[0.0] * 30, 1.0, *[0.0] * 30])) == [40, 71]
    assert "at most" not in verdicts(RULE, each("grad_norm", [*EARLY, 1e-8, 1.0, *[0.0] * 30]))[0].message


def test_thresholds() -> None:
    assert steps_of(VanishingGradients(ratio=0.5, early=1, steps=2), each("grad_norm", [2.0, 1.0, 1.0])) == [3]
