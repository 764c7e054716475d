from __future__ import annotations

import math

import pytest

from halfstep.monitor.rules import ScaleCollapse
from tests.monitor.rules.streams import each, scaled, steps_of, verdicts

RULE = ScaleCollapse()


def test_a_collapse_is_told_once() -> None:
    (alert,) = verdicts(RULE, scaled("." * 500 + "x" * 14 + "." * 50))
    assert alert.step == 511
    assert "fell from 65536 to 64, by a factor of 1024, within 100 steps" in alert.message
    assert "halfstep diagnose" in alert.advice


def test_a_fall_in_several_parts_is_one_collapse() -> None:
    assert steps_of(RULE, scaled("." * 500 + "xx........." * 5 + ".")) == [500 + 4 * 11 + 3]


def test_a_skip_long_before_does_not_hide_it() -> None:
    assert steps_of(RULE, scaled("." * 500 + "x" + "." * 94 + "x" * 12)) == [606]


@pytest.mark.parametrize(
    "flags",
    [
        "x" * 16 + "." * 500,
        "." * 98 + "x" * 16,
        "." * 500 + "x" * 9 + "." * 500,
        "." * 500 + ("x" + "." * 11) * 16 + "." * 500,
        ("." * 200 + "*") * 20,
        "." * 500,
    ],
    ids=["start", "hardly begun", "9 halvings", "slow", "healthy", "steady"],
)
def test_no_alert(flags: str) -> None:
    assert steps_of(RULE, scaled(flags)) == []


def test_it_is_armed_again_when_the_scale_is_stable_again() -> None:
    collapse = "x" * 10 + "."
    assert steps_of(RULE, scaled("." * 150 + collapse + "." * 90 + collapse, scale=2.0**30)) == [161]
    assert steps_of(RULE, scaled("." * 150 + collapse + "." * 110 + collapse, scale=2.0**30)) == [161, 282]


def test_what_is_not_known_does_not_count() -> None:
    assert steps_of(RULE, each("scale", [*[1024.0] * 150, math.nan, 0.0, -1.0, math.inf, *[1024.0] * 50])) == []
    assert steps_of(RULE, each("scale", [*[1024.0] * 150, math.nan, 1.0])) == [152]


def test_thresholds() -> None:
    assert steps_of(ScaleCollapse(factor=4.0, steps=5, stable_steps=3), scaled("....xx.")) == [7]
    assert steps_of(ScaleCollapse(factor=4.0, steps=5, stable_steps=3), scaled("....x...x.")) == [10]
    assert steps_of(ScaleCollapse(factor=4.0, steps=5, stable_steps=3), scaled("....x....x.")) == []
