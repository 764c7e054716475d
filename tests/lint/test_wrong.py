"""Longer scripts with mistakes at the lines that say so: exactly those are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.lint.rules import RULES
from tests.lint.judging import DEFAULT, findings, fixed

SCRIPTS = sorted(Path(__file__).with_name("wrong").glob("*.py"))
_MARK = re.compile(r"# expect: (?P<names>\w+(?:, \w+)*)$")


def marked(text: str) -> list[tuple[int, str]]:
    """The lines and rules that a script says it breaks."""
    found = [(number, match["names"]) for number, line in enumerate(text.splitlines(), 1) if (match := _MARK.search(line))]
    return sorted((number, name) for number, names in found for name in names.split(", "))


def test_the_scripts_are_there() -> None:
    assert len(SCRIPTS) >= 25


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_is_marked_is_found(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    expected = marked(text)
    assert expected, "a wrong script marks its mistakes"
    assert {name for _, name in expected} <= {rule.name for rule in RULES}
    assert findings(text) == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_is_fixed_is_not_found_again(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    mended = fixed(text)
    compile(mended, script.name, "exec")
    left = findings(mended, DEFAULT)
    # What has no fix stays; nothing comes in that was not there.
    assert [name for _, name in left if name not in {name for _, name in marked(text)}] == []
    assert len(left) <= len(marked(text))
    assert fixed(mended) == mended


def test_every_rule_about_the_order_of_a_step_is_broken_somewhere() -> None:
    broken = {name for script in SCRIPTS for _, name in marked(script.read_text(encoding="utf-8"))}
    assert broken >= {
        "average_moved_on_skip",
        "backward_in_autocast",
        "cleaning_after_unscale",
        "clip_before_unscale",
        "closure_with_scaler",
        "gradients_kept_across_update",
        "loop_inside_autocast",
        "missing_update",
        "missing_zero_grad",
        "optimizer_step_bypasses_scaler",
        "repeated_unscale",
        "repeated_update",
        "scaled_norm_logged",
        "unconditional_scheduler_step",
        "unscaled_backward",
        "zero_grad_per_microbatch",
    }
