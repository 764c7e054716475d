"""Every rule by its own examples: they are its documentation, and hold word for word."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from halfstep.lint.rules import RULES
from halfstep.lint.rules.rule import AbstractRule, Bad
from tests.lint.judging import findings, fixed, judging_rules, messages, offers_fix

# Other people's configurations and records hold these: a code never comes to mean another rule.
CODES = {
    "HS001": "deprecated_namespace",
    "HS002": "clip_before_unscale",
    "HS003": "backward_in_autocast",
    "HS004": "unscaled_backward",
    "HS005": "missing_update",
    "HS006": "optimizer_step_bypasses_scaler",
    "HS007": "repeated_update",
    "HS008": "repeated_unscale",
    "HS009": "scaler_created_in_loop",
    "HS010": "scaler_not_saved",
    "HS011": "scaler_not_restored",
    "HS012": "fp16_without_scaler",
    "HS013": "scaler_with_bf16",
    "HS014": "half_model_with_scaler",
    "HS015": "unconditional_scheduler_step",
    "HS016": "closure_with_scaler",
    "HS017": "bce_under_autocast",
    "HS018": "sync_every_step",
    "HS019": "unknown_scaler_attribute",
    "HS020": "unknown_autocast_argument",
    "HS021": "emulated_bf16_counted",
    "HS022": "apex_amp",
    "HS023": "mask_overflows_half",
    "HS024": "epsilon_vanishes_in_half",
    "HS025": "norm_in_half",
    "HS026": "sharded_scaler_positional",
    "HS027": "autocast_reused",
    "HS028": "loop_inside_autocast",
    "HS029": "missing_zero_grad",
    "HS030": "half_adam_epsilon",
    "HS031": "dataparallel_forward_without_autocast",
    "HS032": "scaler_without_autocast",
    "HS033": "average_moved_on_skip",
    "HS034": "scaled_norm_logged",
    "HS035": "autocast_without_device",
    "HS036": "gradients_kept_across_update",
    "HS037": "zero_grad_per_microbatch",
    "HS038": "cleaning_after_unscale",
}
WARNINGS = {1, 3, 10, 11, 12, 13, 15, 21, 22, 24, 25, 28, 31, 32, 33, 34, 37}
SEVERITIES = {code: "info" if number == 18 else "warning" if number in WARNINGS else "error" for number, code in enumerate(CODES, 1)}

BAD = [pytest.param(rule, bad, id=f"{rule.name}-{index}") for rule in RULES for index, bad in enumerate(rule.bad)]
GOOD = [pytest.param(rule, code, id=f"{rule.name}-{index}") for rule in RULES for index, code in enumerate(rule.good)]
EACH = [pytest.param(rule, id=rule.name) for rule in RULES]


@pytest.mark.parametrize(("rule", "bad"), BAD)
def test_bad_code_is_found_once_at_its_line(rule: AbstractRule, bad: Bad) -> None:
    compile(bad.code, "bad", "exec")
    assert findings(bad.code, judging_rules(rule)) == [(bad.line, rule.name)]


@pytest.mark.parametrize(("rule", "bad"), BAD)
def test_bad_code_becomes_what_it_is_told_to(rule: AbstractRule, bad: Bad) -> None:
    rules = judging_rules(rule)
    assert offers_fix(bad.code, rules) == (bad.fixed is not None)
    assert fixed(bad.code, rules) == (bad.code if bad.fixed is None else bad.fixed)


@pytest.mark.parametrize(("rule", "bad"), [case for case in BAD if isinstance(case.values[1], Bad) and case.values[1].fixed is not None])
def test_fixed_code_is_clean_and_stays_as_it_is(rule: AbstractRule, bad: Bad) -> None:
    assert bad.fixed is not None
    rules = judging_rules(rule)
    compile(bad.fixed, "fixed", "exec")
    assert bad.fixed != bad.code
    assert findings(bad.fixed, rules) == []
    assert fixed(bad.fixed, rules) == bad.fixed


@pytest.mark.parametrize(("rule", "code"), GOOD)
def test_good_code_is_left_alone(rule: AbstractRule, code: str) -> None:
    rules = judging_rules(rule)
    compile(code, "good", "exec")
    assert findings(code, rules) == []
    assert fixed(code, rules) == code


@pytest.mark.parametrize(("rule", "bad"), BAD)
def test_a_message_is_whole_sentences_that_quote_the_code(rule: AbstractRule, bad: Bad) -> None:
    (message,) = messages(bad.code, [rule])
    assert message.endswith(".")
    assert "\n" not in message
    assert "  " not in message
    assert message.count("`") >= 2, "names of the user's own stand in backquotes"
    assert message.count("`") % 2 == 0
    assert len(re.findall(r"[.:;] ", message)) >= 1, "what is wrong, and then what to do"


@pytest.mark.parametrize(("rule", "bad"), BAD)
def test_windows_line_ends_and_tabs_change_nothing(rule: AbstractRule, bad: Bad) -> None:
    code = bad.code.replace("    ", "\t")
    assert [line for line, _ in findings(code, judging_rules(rule))] == [bad.line]
    assert findings(bad.code.replace("\n", "\r\n"), judging_rules(rule)) == [(bad.line, rule.name)]


@pytest.mark.parametrize("rule", EACH)
def test_there_are_enough_examples(rule: AbstractRule) -> None:
    assert len(rule.bad) >= 2
    assert len(rule.good) >= 3
    texts = [*(bad.code for bad in rule.bad), *rule.good]
    assert len(set(texts)) == len(texts)
    assert all(text.endswith("\n") and not text.startswith("\n") for text in texts)
    assert all(1 <= bad.line <= bad.code.count("\n") for bad in rule.bad)


@pytest.mark.parametrize("rule", EACH)
def test_a_rule_is_named_after_its_class_and_file(rule: AbstractRule) -> None:
    kind = type(rule)
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == rule.name
    assert Path(inspect.getfile(kind)).stem == rule.name
    assert kind.__final__  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", EACH)
def test_a_rule_explains_itself(rule: AbstractRule) -> None:
    assert rule.summary.endswith(".")
    assert "\n" not in rule.summary
    assert len(rule.explanation.split()) >= 40
    assert any(bad.fixed is not None for bad in rule.bad) <= ("fix" in rule.explanation.lower())


def test_codes_and_names_are_the_promised_ones() -> None:
    assert {rule.code: rule.name for rule in RULES} == CODES
    assert {rule.code: rule.severity for rule in RULES} == SEVERITIES


def test_rules_are_listed_in_order_of_their_codes() -> None:
    assert [rule.code for rule in RULES] == list(CODES)


def test_every_file_of_rules_is_listed() -> None:
    folder = Path(inspect.getfile(AbstractRule)).parent
    files = {path.stem for path in folder.glob("*.py") if re.search(r"^class \w+\(AbstractRule\)", path.read_text(encoding="utf-8"), re.M)}
    assert files == {rule.name for rule in RULES}
