"""Checks and fixes of a text by rules, as the tests of rules want them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep.lint.fixing import Checked, fix_text
from halfstep.lint.module import parse_module
from halfstep.lint.rules import RULES
from halfstep.lint.rules.rule import AbstractRule, Finding

DEFAULT: tuple[AbstractRule, ...] = tuple(rule for rule in RULES if rule.severity != "info")


def judging_rules(rule: AbstractRule) -> tuple[AbstractRule, ...]:
    """Those that judge a rule's examples: all that are on by default, and the rule itself."""
    return DEFAULT if rule in DEFAULT else (*DEFAULT, rule)


def findings(text: str, rules: Sequence[AbstractRule] = DEFAULT) -> list[tuple[int, str]]:
    """The lines and names of all findings in a text, in order."""
    return sorted((getattr(finding.node, "lineno", 0), rule.name) for rule, finding in _found(text, rules))


def messages(text: str, rules: Sequence[AbstractRule] = DEFAULT) -> list[str]:
    """What all findings in a text say."""
    return [finding.message for _, finding in _found(text, rules)]


def offers_fix(text: str, rules: Sequence[AbstractRule]) -> bool:
    """Whether any finding in a text comes with a fix."""
    return any(finding.fix is not None for _, finding in _found(text, rules))


def fixed(text: str, rules: Sequence[AbstractRule] = DEFAULT) -> str:
    """A text after all fixes, the unsafe ones included."""
    return fix_text(text, check=lambda changed: _checked(changed, rules), allowed=frozenset({"safe", "unsafe"})).text


def _found(text: str, rules: Sequence[AbstractRule]) -> list[tuple[AbstractRule, Finding]]:
    module = parse_module(text)
    return [(rule, finding) for rule in rules for finding in rule.check(module)]


def _checked(text: str, rules: Sequence[AbstractRule]) -> Checked:
    try:
        module = parse_module(text)
    except SyntaxError:
        return Checked(tree=ast.Module(body=[], type_ignores=[]), findings=())
    return Checked(tree=module.tree, findings=[finding for rule in rules for finding in rule.check(module)])
