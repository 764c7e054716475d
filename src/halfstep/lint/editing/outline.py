"""The statements of a module and the lines that they stand on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from halfstep.errors import HalfstepError
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
from halfstep.lint.lines import lines_of

__all__ = ["Block", "EditError", "Outline", "blocks", "first_line", "last_line"]


@final
class EditError(HalfstepError, ValueError):
    """An edit cannot be applied to this text; its fix is left out."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Statements that follow each other at one indentation.

    Attributes:
        parent: The statement that they belong to; `None` at the level of the module.
        statements: The statements.
    """

    parent: ast.stmt | None
    statements: Sequence[ast.stmt]


def blocks(node: ast.stmt | ast.Module) -> Iterator[list[ast.stmt]]:
    """The blocks of a statement, in the order of the source; those that it may have and has not are empty.

    Args:
        node: The statement.
    """
    if isinstance(node, ast.Match):
        yield from (case.body for case in node.cases)
        return
    body: list[ast.stmt] | None = getattr(node, "body", None)
    if body is not None:
        yield body
    handlers: list[ast.ExceptHandler] = getattr(node, "handlers", [])
    yield from (handler.body for handler in handlers)
    for field in ("orelse", "finalbody"):
        block: list[ast.stmt] | None = getattr(node, field, None)
        if block is not None:
            yield block


def first_line(statement: ast.stmt) -> int:
    """The line that a statement begins on, from 0; with its decorators.

    Args:
        statement: The statement.
    """
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def last_line(statement: ast.stmt) -> int:
    """The line that a statement ends on, from 0.

    Args:
        statement: The statement.
    """
    return (statement.end_lineno or statement.lineno) - 1


@final
class Outline:
    """Where the statements of a module are.

    Attributes:
        tree: The module.
        lines: The lines of its text, with their ends.
    """

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.tree = tree
        self.lines: list[str] = lines_of(text)

    @cached_property
    def _blocks(self) -> dict[ast.stmt, Block]:
        found: dict[ast.stmt, Block] = {}
        waiting: list[ast.stmt | ast.Module] = [self.tree]
        while waiting:
            node = waiting.pop()
            for statements in blocks(node):
                block = Block(node if isinstance(node, ast.stmt) else None, statements)
                found.update(dict.fromkeys(statements, block))
                waiting.extend(statements)
        return found

    @cached_property
    def _statements(self) -> dict[ast.AST, ast.stmt]:
        found: dict[ast.AST, ast.stmt] = {}
        for statement in self._blocks:
            waiting: list[ast.AST] = [statement]
            while waiting:
                for child in ast.iter_child_nodes(waiting.pop()):
                    if not isinstance(child, ast.stmt):
                        # The contexts (`ast.Load`) are shared by all nodes; nobody asks for theirs.
                        found[child] = statement
                        waiting.append(child)
        return found

    def block(self, statement: ast.stmt) -> Block:
        """The block that a statement stands in.

        Args:
            statement: The statement.

        Raises:
            EditError: The statement is not one of this module.
        """
        try:
            return self._blocks[statement]
        except KeyError:
            raise EditError(f"{ast.dump(statement)} is no statement of the module that is edited") from None

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around something that is none itself.

        Args:
            node: The part of the statement.

        Raises:
            EditError: The node is not a part of this module.
        """
        try:
            return self._statements[node]
        except KeyError:
            raise EditError(f"{ast.dump(node)} is no part of the module that is edited") from None

    def around(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements around a statement, the innermost first.

        Args:
            statement: The statement.
        """
        parent = self.block(statement).parent
        while parent is not None:
            yield parent
            parent = self.block(parent).parent

    def siblings(self, first: ast.stmt, last: ast.stmt) -> Sequence[ast.stmt]:
        """The statements from one to another in their block.

        Args:
            first: The first of them.
            last: The last of them.

        Raises:
            EditError: They do not stand in one block, or not in this order.
        """
        statements = self.block(first).statements
        if self.block(last).statements is not statements or statements.index(first) > statements.index(last):
            raise EditError(f"lines {first.lineno} and {last.lineno} do not begin and end a part of one block")
        return statements[statements.index(first) : statements.index(last) + 1]

    def is_elif(self, statement: ast.stmt) -> bool:
        """Whether a statement is the `elif` of another one.

        Args:
            statement: The statement.
        """
        block = self.block(statement)
        return (
            isinstance(statement, ast.If)
            and isinstance(block.parent, ast.If)
            and block.statements is block.parent.orelse
            and self.lines[statement.lineno - 1].lstrip().startswith("elif")
        )

    def touched(self, edit: Edit) -> Sequence[ast.stmt]:
        """The statements that an edit changes.

        Args:
            edit: The edit.

        Raises:
            EditError: It names something that is not in this module.
        """
        match edit:
            case ReplaceExpression():
                return [self.statement(edit.node)]
            case AddArgument() | RemoveArgument():
                return [self.statement(edit.call)]
            case ReplaceStatement() | InsertStatement() | DeleteStatement():
                return self.siblings(edit.statement, edit.statement)
            case MoveOutOfBlock():
                self.siblings(edit.first, edit.block.body[-1])
                return self.siblings(edit.block, edit.block)
            case WrapStatements():
                return self.siblings(edit.first, edit.last)
            case RemoveImport():
                return [self.statement(edit.alias)]
            case AddImport():
                return []
