"""Code whose lines say where a rule is to fire."""

from __future__ import annotations

from textwrap import dedent

from halfstep.lint.rules.rule import AbstractRule
from tests.lint.judging import findings, fixed

MARK = "  # <-"


def check_marked(code: str, rule: AbstractRule) -> None:
    """Fails unless a rule fires exactly at the lines of a code that are marked."""
    text = dedent(code).lstrip("\n")
    expected = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    compile(text, "marked", "exec")
    assert [line for line, _ in findings(text, [rule])] == expected


def fix_all(code: str, rule: AbstractRule) -> str:
    """A code after all fixes of a rule, which are to leave something that compiles and that the rule lets pass."""
    text = dedent(code).lstrip("\n")
    changed = fixed(text, [rule])
    compile(changed, "fixed", "exec")
    return changed
