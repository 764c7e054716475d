from __future__ import annotations

import math

import pytest

from halfstep.monitor.rules import ScaleAtFloor
from tests.monitor.rules.streams import each, steps_of, verdicts

RULE = ScaleAtFloor()
FALL = [8.0, 4.0, 2.0]


def test_a_scale_that_stays_at_its_floor_is_told_once() -> None:
    (alert,) = verdicts(RULE, each("scale", [*FALL, *[1.0] * 50]))
    assert alert.step == 13
    assert "fell to 1 and has been at its floor of 1 or below for 10 steps:" in alert.message
    assert "halfstep diagnose" in alert.advice


def test_a_skip_there_is_told_at_once() -> None:
    (alert,) = verdicts(RULE, [*each("scale", FALL), *each("scale", [1.0], skipped=True)])
    assert "for 1 step, and 1 step of them was skipped" in alert.message


def test_it_goes_below_without_a_floor() -> None:
    (alert,) = verdicts(RULE, each("scale", [*FALL, *[2.0**-n for n in range(12)]]))
    assert f"fell to {2.0**-9:.4g} " in alert.message


@pytest.mark.parametrize(
    "scales",
    [[1.0] * 50, [*FALL, *[1.0] * 9, 2.0], [2.0] * 50, [math.nan] * 50, [*FALL, *[math.nan] * 50], [*FALL, *[-math.inf] * 50]],
    ids=["constant", "short", "above", "unknown", "unknown later", "absurd"],
)
def test_no_alert(scales: list[float]) -> None:
    assert steps_of(RULE, each("scale", scales)) == []


def test_a_scale_that_begins_at_its_floor_may_fall_to_it_later() -> None:
    assert steps_of(RULE, each("scale", [1.0] * 20 + [2.0] * 5 + [1.0] * 20)) == [35]


def test_it_is_armed_again_well_above_the_floor() -> None:
    stays = [1.0] * 10
    assert steps_of(RULE, each("scale", [2.0, *stays, 15.0, *stays])) == [11]
    assert steps_of(RULE, each("scale", [2.0, *stays, 16.0, *stays])) == [11, 22]


def test_a_scale_of_zero_lies_below_any_floor() -> None:
    assert steps_of(RULE, each("scale", [2.0, *[0.0] * 20])) == [11]


def test_thresholds() -> None:
    again = [256.0, 128.0, 128.0, 2047.0, 128.0, 128.0, 2048.0, 128.0, 128.0]
    assert steps_of(ScaleAtFloor(floor=128.0, steps=2), each("scale", again)) == [3, 9]
    assert steps_of(ScaleAtFloor(floor=128.0, steps=2), each("scale", [256.0, 128.0, 128.0])) == [3]
