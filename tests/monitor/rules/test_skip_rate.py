from __future__ import annotations

import pytest

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules import SkipRate
from tests.monitor.rules.streams import scaled, steps_of, verdicts

RULE = SkipRate()


def test_seven_of_the_first_thirty_steps_are_told_with_a_better_scale() -> None:
    (alert,) = verdicts(RULE, scaled("x" * 7 + "." * 500))
    assert alert.step == 30
    assert "7 of the first 30 steps were skipped (23 %)" in alert.message
    assert "began to be taken at a scale of 512." in alert.message
    assert "init_scale=512, growth_interval=200" in alert.advice


def test_the_better_scale_is_that_after_the_last_skip() -> None:
    (alert,) = verdicts(RULE, scaled("xxxxx...xx" + "." * 10 + "+" + "." * 40))
    assert "init_scale=512," in alert.advice


@pytest.mark.parametrize("skips", range(6))
def test_a_few_skips_at_the_start_are_a_scale_that_is_looked_for(skips: int) -> None:
    assert verdicts(RULE, scaled("x" * skips + "." * 300), ended=True) == []


def test_a_start_without_a_step_is_judged_when_there_is_one() -> None:
    (alert,) = verdicts(RULE, scaled("x" * 40 + "." * 100, scale=2.0**60))
    assert alert.step == 41
    assert "40 of the first 41 steps" in alert.message
    assert f"at a scale of {2**20}." in alert.message


def test_a_run_that_ends_within_its_start_is_judged_at_its_end() -> None:
    (alert,) = verdicts(RULE, scaled("x" * 7 + "...."), ended=True)
    assert alert.step == 11
    assert "7 of the first 11 steps" in alert.message
    (alert,) = verdicts(RULE, scaled("x" * 7), ended=True)
    assert "None was taken down to 1024." in alert.message
    assert "init_scale=512," in alert.advice
    assert verdicts(RULE, scaled("x" * 6 + "...."), ended=True) == []
    assert len(verdicts(RULE, scaled("x" * 7 + "." * 500), ended=True)) == 1


@pytest.mark.parametrize(
    "flags",
    [("." * 9 + "*") * 100, ("." * 6 + "+..x") * 100, "." * 30 + ("." * 24 + "x") * 90],
    ids=["grown", "soon", "rare"],
)
def test_what_a_scale_that_settles_explains_is_not_counted(flags: str) -> None:
    assert steps_of(RULE, scaled(flags)) == []


def test_growth_at_the_start_explains_a_skip_there_too() -> None:
    assert verdicts(RULE, scaled("..*" * 12), ended=True) == []


def test_a_growth_explains_one_skip() -> None:
    assert steps_of(SkipRate(window=10, window_skips=2), scaled("." * 30 + "+xx.")) == []
    assert steps_of(SkipRate(window=10, window_skips=2), scaled("." * 30 + "+xxx.")) == [35]
    assert steps_of(SkipRate(window=10, window_skips=2), scaled("." * 30 + "*xx.")) == [34]


def test_a_scale_that_somebody_else_let_fall_explains_nothing() -> None:
    grown_and_back = [*scaled("." * 30 + "+"), *scaled(".", start=32), *scaled("x.", start=33), *scaled("x.", scale=2.0**15, start=35)]
    assert steps_of(SkipRate(window=10, window_skips=2), grown_and_back) == [36]


def test_many_skips_later_on_are_told_once() -> None:
    (alert,) = verdicts(RULE, scaled("." * 530 + "x........." * 30 + "." * 300))
    assert alert.step == 530 + 92
    assert "10 of the last 200 steps were skipped (5 %)" in alert.message
    assert "halfstep diagnose" in alert.advice


def test_early_on_the_window_is_what_there_is() -> None:
    (alert,) = verdicts(RULE, scaled("." * 30 + "x." * 10))
    assert "10 of the last 20 steps were skipped (50 %)" in alert.message


def test_skips_without_a_step_between_them_are_for_another_rule() -> None:
    assert steps_of(RULE, scaled("." * 50 + "x" * 500)) == []
    assert steps_of(RULE, scaled("." * 50 + "x" * 12 + ".")) == [63]


def test_a_window_forgets() -> None:
    rule = SkipRate(window=10, window_skips=2)
    assert steps_of(rule, scaled("." * 30 + "x.......x.")) == [40]
    assert steps_of(rule, scaled("." * 30 + "x........x.")) == []


def test_half_as_many_skips_arm_it_again() -> None:
    rule = SkipRate(window=10, window_skips=4)
    burst = "x.x.x.x."
    assert steps_of(rule, scaled("." * 30 + burst + "." * 4 + "x.x." + "x.x.")) == [38]
    assert steps_of(rule, scaled("." * 30 + burst + "." * 5 + burst)) == [38]
    assert steps_of(rule, scaled("." * 30 + burst + "." * 10 + burst)) == [38, 56]


def test_a_growth_in_a_long_calm_stretch_explains_a_skip() -> None:
    assert steps_of(SkipRate(window=10, window_skips=1), scaled("." * 90 + "+..x.")) == []
    assert steps_of(SkipRate(window=10, window_skips=1), scaled("." * 90 + "...x.")) == [95]


def test_thresholds() -> None:
    assert steps_of(SkipRate(window=2, window_skips=2), scaled("." * 30 + "xx.")) == []
    assert steps_of(SkipRate(window=3, window_skips=3), scaled("." * 30 + "xx.")) == []
    assert steps_of(SkipRate(start_steps=5, start_skips=2), scaled("xx...")) == [5]
    assert steps_of(SkipRate(window_skips=3), scaled("." * 40 + "x.x.x.")) == [46]


@pytest.mark.parametrize("names", [("start_steps", "start_skips"), ("window", "window_skips")])
def test_more_skips_than_steps_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{names[0]}=3, {names[1]}=4\): there are fewer steps than skips"):
        SkipRate(**dict(zip(names, (3, 4), strict=True)))
