"""What is taken for granted about conditions on one way through a function, so that equal tests are answered alike."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias, final

from halfstep.lint.values import Autocast, Constant, Scaler

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = ["Assumptions", "Conditions", "Question", "forget", "repeatable"]

# A condition in a normal form, and the names that it depends on.
Question: TypeAlias = tuple[str, frozenset[str]]
Assumptions: TypeAlias = Mapping[Question, bool]


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(
        part.id if isinstance(part, ast.Name) else part.attr for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))
    )


def _question(test: ast.expr) -> tuple[Question, bool]:
    wanted = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        literal = test.comparators[0].value
        if isinstance(test.ops[0], (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)) and literal is None:
            return (ast.unparse(test.left), _names(test.left)), wanted == isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
        if isinstance(test.ops[0], ast.NotEq):
            same = ast.Compare(left=test.left, ops=[ast.Eq()], comparators=test.comparators)
            return (ast.unparse(same), _names(test)), not wanted
    return (ast.unparse(test), _names(test)), wanted


@final
class Conditions:
    """The conditions of a file, and what follows from one for another.

    Args:
        module: The file.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._questions: dict[ast.expr, tuple[Question, bool]] = {}
        self._always: dict[ast.expr, bool | None] = {}

    def question(self, test: ast.expr) -> tuple[Question, bool]:
        """A condition in a normal form, and the answer of that form for which the condition holds.

        `x`, `not x`, `x is None` and `x is not None` are one question, since nobody has both a scaler that is false and one that is None.
        """
        if test not in self._questions:
            self._questions[test] = _question(test)
        return self._questions[test]

    def answer(self, test: ast.expr, assumptions: Assumptions) -> bool | None:
        """Whether a condition holds; `None` where it may or may not.

        Args:
            test: The condition.
            assumptions: What is taken for granted.
        """
        if isinstance(test, ast.BoolOp):
            answers = [self.answer(part, assumptions) for part in test.values]
            deciding = isinstance(test.op, ast.Or)
            if deciding in answers:
                return deciding
            return None if None in answers else not deciding
        question, wanted = self.question(test)
        if question in assumptions:
            return assumptions[question] == wanted
        inner = test.operand if isinstance(test, ast.UnaryOp) else test
        if inner not in self._always:
            self._always[inner] = self._find_always(inner)
        known = self._always[inner]
        return None if known is None else known == wanted

    def _find_always(self, test: ast.expr) -> bool | None:
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "is_enabled":
            value = self._module.value(test.func.value)
            return value.enabled if isinstance(value, Scaler | Autocast) else None
        if isinstance(test, ast.Name):
            value = self._module.value(test)
            if isinstance(value, Constant) and isinstance(value.value, bool) and len(self._module.bindings(test)) == 1:
                return value.value
        return None

    def assume(self, test: ast.expr, assumptions: Assumptions, *, holds: bool) -> Assumptions:
        """What is taken for granted once a condition was found to hold, or not to.

        Args:
            test: The condition.
            assumptions: What was taken for granted before.
            holds: The answer.
        """
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            # All parts of `a and b` hold; no part of a false `a or b` does.
            for part in test.values:
                assumptions = self.assume(part, assumptions, holds=holds)
            return assumptions
        question, wanted = self.question(test)
        return {**assumptions, question: wanted == holds}


def forget(assumptions: Assumptions, changed: frozenset[str]) -> Assumptions:
    """What is still granted after names were given other values.

    Args:
        assumptions: What was taken for granted before.
        changed: The names.
    """
    if not changed or not assumptions:
        return assumptions
    return {question: held for question, held in assumptions.items() if not question[1] & changed}


def repeatable(assumptions: Assumptions) -> Assumptions:
    """What is still granted in the next iteration of a loop: what a function answered may be another then.

    Args:
        assumptions: What was taken for granted in the one before.
    """
    return {question: held for question, held in assumptions.items() if "(" not in question[0]}
