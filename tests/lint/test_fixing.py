from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from halfstep.lint.edits import AddArgument, Edit, InsertStatement, ReplaceExpression
from halfstep.lint.fixing import Checked, FixedText, fix_text
from halfstep.lint.rules.rule import Finding, Fix, Safety

SAFE: frozenset[Safety] = frozenset({"safe"})
BOTH: frozenset[Safety] = frozenset({"safe", "unsafe"})


def _check(rule: Callable[[ast.AST], Edit | None], *, safety: Safety = "safe") -> Callable[[str], Checked]:
    """What checks with a rule that knows one node at a time."""

    def findings(tree: ast.Module) -> Iterator[Finding]:
        for node in ast.walk(tree):
            edit = rule(node)
            if edit is not None:
                yield Finding(node=node, message="", fix=Fix(edits=(edit,), safety=safety))

    def check(text: str) -> Checked:
        tree = ast.parse(text)
        return Checked(tree=tree, findings=list(findings(tree)))

    return check


def _renamed(**names: str) -> Callable[[ast.AST], Edit | None]:
    def rule(node: ast.AST) -> Edit | None:
        if isinstance(node, ast.Name) and node.id in names:
            return ReplaceExpression(node=node, code=names[node.id])
        return None

    return rule


def _no_device(node: ast.AST) -> Edit | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "autocast" and not node.args:
        return AddArgument(call=node, code='"cuda"', where="first")
    return None


def test_fixes_of_statements_in_each_other_take_a_pass_each() -> None:
    text = "with autocast():  # one\n    with autocast():\n        with autocast(): pass\n"
    fixed = fix_text(text, check=_check(_no_device), allowed=SAFE)
    expected = text.replace("autocast()", 'autocast("cuda")')
    assert fixed == FixedText(text=expected, applied=3, passes=3)


def test_what_a_fix_uncovers_is_fixed_too() -> None:
    fixed = fix_text("a\nx = a\n", check=_check(_renamed(a="b", b="c", c="d")), allowed=SAFE)
    assert fixed == FixedText(text="d\nx = d\n", applied=6, passes=3)


def test_fixing_again_changes_nothing() -> None:
    check = _check(_renamed(a="b", b="c"))
    once = fix_text("a, b, c\n", check=check, allowed=SAFE)
    assert fix_text(once.text, check=check, allowed=SAFE) == FixedText(text=once.text, applied=0, passes=0)


def test_an_endless_to_and_fro_ends() -> None:
    fixed = fix_text("a\n", check=_check(_renamed(a="b", b="a")), allowed=SAFE)
    assert fixed == FixedText(text="b\n", applied=1, passes=1)


def test_a_fix_that_always_finds_more_ends_after_ten_passes() -> None:
    def rule(node: ast.AST) -> Edit | None:
        if isinstance(node, ast.Module):
            return InsertStatement(statement=node.body[-1], code="m()", where="after")
        return None

    fixed = fix_text("a\n", check=_check(rule), allowed=SAFE)
    assert fixed == FixedText(text="a\n" + "m()\n" * 10, applied=10, passes=10)


@pytest.mark.parametrize("text", ["a\r\n\fb  \n", "a", "", "\t\n"])
def test_clean_text_comes_back_byte_for_byte(text: str) -> None:
    assert fix_text(text, check=_check(_no_device), allowed=BOTH).text is text


def test_only_what_is_allowed_is_applied() -> None:
    check = _check(_renamed(a="b"), safety="unsafe")
    assert fix_text("a\n", check=check, allowed=SAFE) == FixedText(text="a\n", applied=0, passes=0)
    assert fix_text("a\n", check=check, allowed=BOTH) == FixedText(text="b\n", applied=1, passes=1)


def test_findings_without_a_fix_change_nothing() -> None:
    def check(text: str) -> Checked:
        tree = ast.parse(text)
        return Checked(tree=tree, findings=[Finding(node=tree.body[0], message="")])

    assert fix_text("a\n", check=check, allowed=BOTH) == FixedText(text="a\n", applied=0, passes=0)


def test_a_fix_that_would_break_the_text_is_never_made() -> None:
    check = _check(_renamed(a="b c"))
    assert fix_text("a\n", check=check, allowed=SAFE) == FixedText(text="a\n", applied=0, passes=0)
