"""Turns edits into changes of libcst's tree of an excerpt."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from typing import final

import libcst as cst

from halfstep.lint.editing.changes import Changes, Insertion
from halfstep.lint.editing.commas import add_argument, drop_aliases, drop_argument
from halfstep.lint.editing.outline import EditError, Outline
from halfstep.lint.editing.pairing import Expressions, Statement
from halfstep.lint.editing.substitution import substitute
from halfstep.lint.edits import (
    AddArgument,
    AddImport,
    DeleteStatement,
    Edit,
    InsertStatement,
    MoveOutOfBlock,
    RemoveArgument,
    RemoveImport,
    ReplaceExpression,
    ReplaceStatement,
    WrapStatements,
)

__all__ = ["plan"]

# The order in which the changes of one node are made: what is removed is counted in the arguments as they were.
_ADDED = 0
_REPLACED = 1


@final
class _Plan:
    """Collects the changes of one excerpt."""

    def __init__(self, outline: Outline, pairs: dict[ast.stmt, Statement], changes: Changes) -> None:
        self._outline = outline
        self._pairs = pairs
        self._changes = changes
        self._expressions: dict[ast.stmt, Expressions] = {}
        self._dropped: dict[ast.stmt, set[int]] = {}

    def note(self, edit: Edit, *, own_line: bool) -> None:
        """Adds what an edit changes.

        Args:
            edit: The edit.
            own_line: Whether an inserted statement may not share a line with others.
        """
        for statement in self._outline.touched(edit):
            self._reach(statement)
        match edit:
            case ReplaceExpression() | AddArgument() | RemoveArgument():
                self._note_expression(edit)
            case ReplaceStatement():
                self._replace(edit.statement, edit.code)
            case DeleteStatement():
                self._replace(edit.statement, "")
            case InsertStatement():
                change = self._changes.of(self._pairs[edit.statement])
                side = change.before if edit.where == "before" else change.after
                side.append(Insertion(code=edit.code, own_line=own_line))
            case MoveOutOfBlock():
                self._reach(edit.first)
                self._changes.of(self._pairs[edit.first]).moves = True
            case WrapStatements():
                self._changes.of(self._pairs[edit.first]).wrappers.append(edit.header)
                self._changes.of(self._pairs[edit.last]).wrapped += 1
            case RemoveImport():
                self._drop(edit.alias)
            case AddImport():
                raise EditError("an import has no place before it is found one")

    def finish(self) -> None:
        """Adds what could be told only when all edits were known."""
        for statement, numbers in self._dropped.items():
            other = self._pairs[statement]
            assert isinstance(statement, ast.Import | ast.ImportFrom)
            if len(numbers) == len(statement.names):
                self._replace(statement, "")
            else:
                self._changes.mutate(other, partial(_without_aliases, numbers=numbers), order=_ADDED)

    def _reach(self, statement: ast.stmt) -> None:
        for reached in (statement, *self._outline.around(statement)):
            if reached in self._pairs:
                self._changes.reached.add(id(self._pairs[reached]))

    def _find(self, node: ast.expr) -> tuple[Statement, cst.BaseExpression]:
        statement = self._outline.statement(node)
        if statement not in self._expressions:
            self._expressions[statement] = Expressions(statement, self._pairs[statement])
        return self._pairs[statement], self._expressions[statement].find(node)

    def _note_expression(self, edit: ReplaceExpression | AddArgument | RemoveArgument) -> None:
        if isinstance(edit, ReplaceExpression):
            statement, old = self._find(edit.node)
            self._changes.mutate(old, partial(_exchanged, new=substitute(statement, old, edit.code)), order=_REPLACED)
            return
        _, call = self._find(edit.call)
        if isinstance(edit, AddArgument):
            self._changes.mutate(call, partial(_with_argument, code=edit.code, first=edit.where == "first"), order=_ADDED)
            return
        arguments: list[ast.expr | ast.keyword] = [*edit.call.args, *edit.call.keywords]
        arguments.sort(key=lambda argument: (argument.lineno, argument.col_offset))
        number = arguments.index(edit.argument)
        self._changes.mutate(call, partial(_without_argument, number=number), order=-1 - number)

    def _replace(self, statement: ast.stmt, code: str) -> None:
        change = self._changes.of(self._pairs[statement])
        if change.replacement is not None:
            raise EditError(f"line {statement.lineno} is replaced or deleted twice")
        change.replacement = code

    def _drop(self, alias: ast.alias) -> None:
        statement = self._outline.statement(alias)
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        self._dropped.setdefault(statement, set()).add(statement.names.index(alias))


def _exchanged(_: cst.CSTNode, *, new: cst.BaseExpression) -> cst.CSTNode:
    return new


def _with_argument(node: cst.CSTNode, *, code: str, first: bool) -> cst.CSTNode:
    return add_argument(cst.ensure_type(node, cst.Call), code, first=first)


def _without_argument(node: cst.CSTNode, *, number: int) -> cst.CSTNode:
    return drop_argument(cst.ensure_type(node, cst.Call), number)


def _without_aliases(node: cst.CSTNode, *, numbers: set[int]) -> cst.CSTNode:
    assert isinstance(node, cst.Import | cst.ImportFrom)
    return drop_aliases(node, numbers)


def plan(outline: Outline, pairs: dict[ast.stmt, Statement], edits: Sequence[tuple[Edit, bool]], *, indent: str) -> Changes:
    """What edits change in the tree of an excerpt.

    Args:
        outline: The module.
        pairs: Which statement of libcst's tree is which.
        edits: The edits, each with whether what it inserts may not share a line with others.
        indent: How new blocks are indented.

    Raises:
        EditError: An edit has no place in this tree, or two cannot be made together.
    """
    changes = Changes(indent=indent)
    collected = _Plan(outline, pairs, changes)
    for edit, own_line in edits:
        collected.note(edit, own_line=own_line)
    collected.finish()
    return changes
