from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules import ScaleOutOfRange
from tests.monitor.rules.streams import each, steps_of, verdicts

RULE = ScaleOutOfRange()
CAP = 2.0**127


def test_a_scale_that_stays_too_low_is_told_once() -> None:
    (alert,) = verdicts(RULE, each("scale", [128.0, *[64.0] * 500]))
    assert alert.step == 201
    assert "below 100 for 200 steps and is 64 now: gradients below 9.3e-10 become zero" in alert.message
    assert "halfstep audit" in alert.advice


def test_a_scale_that_stays_too_high_is_told_once() -> None:
    (alert,) = verdicts(RULE, each("scale", [2.0**19, *[2.0**20] * 500]))
    assert alert.step == 201
    assert "above 1000000 for 200 steps and is 1048576 now" in alert.message
    assert "scaling is doing nothing" in alert.message
    assert "weight of the loss" in alert.advice


def test_a_scale_at_its_cap_is_told_at_once() -> None:
    (alert,) = verdicts(RULE, each("scale", [CAP / 2, *[CAP] * 500]))
    assert alert.step == 2
    assert "reached its cap, 1.701e+38" in alert.message
    assert "enabled=False" in alert.advice


def test_a_scale_on_its_way_to_the_cap_is_told_twice() -> None:
    scales = [2.0**16, *[2.0**21] * 200, *[CAP] * 300]
    assert steps_of(RULE, each("scale", scales)) == [201, 202]


@pytest.mark.parametrize(
    ("scales", "changes"),
    [
        pytest.param([64.0] * 500, {}, id="static and low"),
        pytest.param([CAP] * 500, {}, id="static and high"),
        pytest.param([128.0, *[64.0] * 199, *[128.0] * 300], {}, id="short"),
        pytest.param([128.0, *([64.0] * 100 + [128.0]) * 5], {}, id="back now and then"),
        pytest.param([100.0, *[1e6] * 300, *[100.0] * 300], {}, id="just inside"),
        pytest.param([128.0, *[64.0] * 500], {"precision": "bf16"}, id="bf16"),
        pytest.param([128.0, *[1.0] * 500], {"precision": "fp32"}, id="fp32"),
        pytest.param([128.0, *[math.nan] * 500], {}, id="unknown"),
        pytest.param([128.0, *[math.inf, 0.0, -1.0] * 200], {}, id="absurd"),
    ],
)
def test_no_alert(scales: list[float], changes: dict[str, Any]) -> None:
    assert steps_of(RULE, each("scale", scales, **changes)) == []


def test_a_scale_that_is_back_in_range_arms_it_again() -> None:
    assert steps_of(RULE, each("scale", [128.0, *[64.0] * 250, 128.0, *[64.0] * 250])) == [201, 452]
    assert steps_of(RULE, each("scale", [1.0, CAP, 1024.0, CAP])) == [2, 4]


def test_thresholds() -> None:
    assert steps_of(ScaleOutOfRange(low=1.0, high=10.0, steps=2), each("scale", [5.0, 11.0, 11.0, 11.0])) == [3]


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"low=5.0, high=5.0\): low must lie below high"):
        ScaleOutOfRange(low=5.0, high=5.0)
