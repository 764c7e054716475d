from __future__ import annotations

import math

import pytest

from halfstep.monitor.rules import PersistentSkips
from tests.monitor.rules.streams import scaled, steps_of, verdicts

RULE = PersistentSkips()


def test_ten_skips_in_a_row_are_told_once() -> None:
    (alert,) = verdicts(RULE, scaled("." * 40 + "x" * 30))
    assert (alert.step, alert.severity) == (50, "error")
    assert "10 steps in a row were skipped" in alert.message
    assert "fell from 65536 to 128 in them" in alert.message
    assert "fault that no loss scale cures is likely" in alert.message
    assert "halfstep diagnose" in alert.advice


@pytest.mark.parametrize("flags", ["." * 20 + "x" * 9 + ".", ("x" * 9 + ".") * 8, "." * 50, ""])
def test_fewer_in_a_row_are_not(flags: str) -> None:
    assert steps_of(RULE, scaled(flags)) == []


def test_a_step_that_is_taken_arms_it_again() -> None:
    assert steps_of(RULE, scaled("x" * 10 + "." + "x" * 12)) == [10, 21]


def test_the_number_of_skips_is_a_threshold() -> None:
    assert steps_of(PersistentSkips(skips=3), scaled("..xxxx")) == [5]


def test_a_scale_that_began_too_high_is_told_from_a_fault() -> None:
    (alert,) = verdicts(RULE, scaled("x" * 12, loss=4096.0))
    assert "None was taken before, and the loss is finite (4096)" in alert.message
    assert "init_scale=64)" in alert.advice
    assert "cures" not in alert.message


@pytest.mark.parametrize(
    ("scale", "before", "is_low"), [(2.0**16, ".", True), (2.0**17, ".", False), (2.0**10, "", True)], ids=["low", "high", "no room below"]
)
def test_a_low_scale_is_taken_for_a_fault(scale: float, before: str, is_low: bool) -> None:
    (alert,) = verdicts(RULE, scaled(before + "x" * 10, scale=scale))
    assert ("fault that no loss scale cures is likely" in alert.message) is is_low
    assert "init_scale" not in alert.advice
    assert "halfstep diagnose" in alert.advice


def test_what_a_low_scale_is_is_a_threshold() -> None:
    (alert,) = verdicts(PersistentSkips(low_scale=1.0), scaled("." + "x" * 10))
    assert "cures" not in alert.message


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan], ids=str)
def test_a_loss_that_is_not_finite_is_beyond_any_scale(loss: float) -> None:
    (alert,) = verdicts(RULE, [*scaled("."), *scaled("x" * 10, start=2, loss=loss)])
    assert f"The loss itself is {'NaN' if math.isnan(loss) else loss}, and no loss scale changes that" in alert.message
    assert "forward pass" in alert.advice


def test_a_loss_that_nobody_knows_is_not_called_nan() -> None:
    (alert,) = verdicts(RULE, scaled("." + "x" * 10, loss=math.nan))
    assert "NaN" not in alert.message
    (alert,) = verdicts(RULE, scaled("x" * 10, loss=math.nan))
    assert "NaN" not in alert.message
    assert "init_scale" not in alert.advice


def test_a_scale_that_does_not_move_is_named() -> None:
    stream = [*scaled(".", scale=8.0), *(each for n in range(2, 12) for each in scaled("x", scale=8.0, start=n))]
    (alert,) = verdicts(RULE, stream)
    assert "The loss scale is 8." in alert.message
