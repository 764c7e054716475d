"""What holds for all rules."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.monitor import rules
from halfstep.monitor.rules import DEFAULT_RULES, AbstractRule
from halfstep.records import StepRecord
from tests.monitor.rules.streams import SENSITIVE_RULES, alerts_of, each, record, streams, verdicts

by_name = pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)

THRESHOLDS = [pytest.param(rule, field.name, id=f"{rule.name}-{field.name}") for rule in DEFAULT_RULES for field in fields(rule)]  # type: ignore[arg-type]


def test_every_rule_is_in_the_table_once() -> None:
    files = {path.stem for path in Path(rules.__path__[0]).glob("*.py")} - {"__init__", "base", "thresholds", "wording"}
    names = [rule.name for rule in DEFAULT_RULES]
    assert sorted(names) == sorted(files)
    assert {type(rule).__name__ for rule in DEFAULT_RULES} == set(rules.__all__) - {"DEFAULT_RULES", "AbstractRule"}
    assert [type(rule) for rule in SENSITIVE_RULES] == [type(rule) for rule in DEFAULT_RULES]


def test_two_rules_are_about_what_is_wrong_for_good() -> None:
    assert {rule.name for rule in DEFAULT_RULES if rule.severity == "error"} == {"persistent_skips", "nonfinite_loss"}
    assert {rule.severity for rule in DEFAULT_RULES} == {"error", "warning"}


@by_name
def test_rules_are_values(rule: AbstractRule) -> None:
    assert type(rule)() == rule
    assert hash(type(rule)()) == hash(rule)
    with pytest.raises(FrozenInstanceError):
        setattr(rule, fields(rule)[0].name, 1)  # type: ignore[arg-type]
    assert not hasattr(rule, "__dict__")


@pytest.mark.parametrize(("rule", "threshold"), THRESHOLDS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "10", None], ids=repr)
def test_thresholds_are_checked(rule: AbstractRule, threshold: str, value: Any) -> None:
    whole = isinstance(getattr(rule, threshold), int)
    is_wrong_type = not isinstance(value, float | int) or value is True or (whole and isinstance(value, float))
    error = InvalidTypeError if is_wrong_type else ConfigurationError
    text = rf"{type(rule).__name__}\({threshold}="
    with pytest.raises(error, match=rf"{text}\.\.\.\) takes a" if is_wrong_type else rf"{text}.*allowed is a"):
        type(rule)(**{threshold: value})


@pytest.mark.parametrize(("rule", "threshold"), THRESHOLDS)
def test_thresholds_are_documented(rule: AbstractRule, threshold: str) -> None:
    lines = [line.strip() for line in (type(rule).__doc__ or "").splitlines()]
    assert any(line.startswith(f"{threshold}: ") for line in lines)


@pytest.mark.parametrize("all_rules", [DEFAULT_RULES, SENSITIVE_RULES], ids=["default", "sensitive"])
@settings(max_examples=40)
@given(stream=streams(optimizers=("", "G")))
def test_a_rule_changes_no_state(all_rules: tuple[AbstractRule, ...], stream: list[StepRecord]) -> None:
    for rule in all_rules:
        states, alerts = [rule.start()], []
        for one in stream:
            state, alert = rule.judge(states[-1], one)
            states.append(state)
            alerts.append(alert)
        kept = [repr(state) for state in states]  # NaN equals nothing, so states are compared as texts.
        again = [rule.judge(state, one) for state, one in zip(states, stream, strict=False)]
        assert [repr(state) for state, _ in again] == kept[1:]
        assert [alert for _, alert in again] == alerts
        assert [repr(rule.end(state)) for state in states] == [repr(rule.end(state)) for state in states]
        assert [repr(state) for state in states] == kept


@given(stream=streams())
def test_alerts_are_whole(stream: list[StepRecord]) -> None:
    names = {rule.name: rule.severity for rule in SENSITIVE_RULES}
    for alert in alerts_of(stream, rules=SENSITIVE_RULES):
        assert alert.severity == names[alert.rule]
        assert alert.site is None
        assert alert.step in {one.step for one in stream}
        assert alert.message.endswith(".")
        assert alert.advice.endswith(".")
        assert "  " not in alert.message + alert.advice


@given(st.integers(0, 2), st.lists(st.booleans(), min_size=30, max_size=60))
def test_nothing_is_told_of_what_is_not_known(epoch: int, taken: list[bool]) -> None:
    unknown = {"scale": math.nan, "loss": math.nan, "grad_norm": None, "lr": math.nan, "step_time_s": math.nan, "memory_bytes": None}
    stream = each("precision", ["fp16" if each_taken else "bf16" for each_taken in taken], scaler=None, epoch=epoch, **unknown)
    assert alerts_of(stream) == []


def test_an_unknown_stretch_hides_no_alert() -> None:
    known = each("loss", [0.5] * 40)
    unknown = each("loss", [math.nan] * 40, grad_norm=1.0)
    assert [alert.rule for alert in alerts_of([*known, *unknown, record(81, loss=math.inf)])] == ["nonfinite_loss"]


def test_a_rule_ends_without_a_step() -> None:
    assert all(rule.end(rule.start()) is None for rule in DEFAULT_RULES)


@pytest.mark.parametrize(
    "name",
    ["persistent_skips", "nonfinite_loss", "skip_rate", "scaler_unused", "scaled_norm_logged", "loss_spike", "vanishing_gradients",
     "step_time_regression"],
)  # fmt: skip
@settings(max_examples=30)
@given(stream=streams(optimizers=("critic",), max_size=40))
def test_one_of_several_optimizers_is_named(name: str, stream: list[StepRecord]) -> None:
    rule = next(rule for rule in SENSITIVE_RULES if rule.name == name)
    assert all(alert.message.startswith("Optimizer critic: ") for alert in verdicts(rule, stream, ended=True))


@pytest.mark.parametrize("name", ["scale_at_floor", "scale_collapse", "scale_out_of_range", "scaler_with_bf16", "memory_growth"])
@settings(max_examples=30)
@given(stream=streams(optimizers=("critic",), max_size=40))
def test_what_optimizers_share_is_told_without_their_names(name: str, stream: list[StepRecord]) -> None:
    rule = next(rule for rule in SENSITIVE_RULES if rule.name == name)
    assert all("critic" not in alert.message for alert in verdicts(rule, stream, ended=True))
