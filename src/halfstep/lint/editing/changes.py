"""What becomes of the statements of an excerpt, in the terms of libcst."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import libcst as cst

from halfstep.lint.editing.pairing import Statement

__all__ = ["Changes", "Insertion", "Row", "StatementChange", "body_of", "rows_of"]

Row: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
_Mutation: TypeAlias = Callable[[cst.CSTNode], cst.CSTNode]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """Code that stands next to a statement.

    Attributes:
        code: The text of one or more statements.
        own_line: Whether it may not share a line with others.
    """

    code: str
    own_line: bool = False


@final
@dataclass(slots=True, kw_only=True)
class StatementChange:
    """What becomes of one statement.

    Attributes:
        before: What stands before it.
        after: What stands behind it.
        replacement: What takes its place: empty where it is deleted, `None` where it stays.
        wrappers: The headers of the blocks that begin with it, the outermost first.
        wrapped: How many of the blocks that are opened end with it.
        moves: Whether it and all that follow it in its block are moved behind the block.
    """

    before: list[Insertion] = field(default_factory=list)
    after: list[Insertion] = field(default_factory=list)
    replacement: str | None = None
    wrappers: list[str] = field(default_factory=list)
    wrapped: int = 0
    moves: bool = False


@final
@dataclass(slots=True, kw_only=True)
class Changes:
    """All that is changed in an excerpt, by the identity of what it is done to.

    Attributes:
        indent: By what a new block is indented more than the statement that it belongs to.
        statements: What becomes of statements.
        mutations: What becomes of expressions and imports; the lower numbers first.
        reached: The statements that are changed or have something in them that is.
    """

    indent: str
    statements: dict[int, StatementChange] = field(default_factory=dict)
    mutations: dict[int, list[tuple[int, _Mutation]]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def of(self, statement: Statement) -> StatementChange:
        """What becomes of a statement, to be filled in.

        Args:
            statement: The statement.
        """
        return self.statements.setdefault(id(statement), StatementChange())

    def mutate(self, node: cst.CSTNode, mutation: _Mutation, *, order: int) -> None:
        """Notes what becomes of an expression or an import.

        Args:
            node: What it is done to.
            mutation: What is done.
            order: When it is done, among all that is done to this node.
        """
        self.mutations.setdefault(id(node), []).append((order, mutation))


@final
class _Indentation(cst.CSTTransformer):
    """Indents the blocks of new code as its surroundings are."""

    def __init__(self, indent: str) -> None:
        self._indent = indent

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.IndentedBlock:  # noqa: N802
        return updated_node.with_changes(indent=self._indent)


def rows_of(code: str, indent: str) -> tuple[list[Row], list[cst.EmptyLine]]:
    """The statements of new code, and the comments behind the last one.

    Args:
        code: The code, as it would stand at the beginning of lines.
        indent: How its blocks are indented.
    """
    text = textwrap.dedent(code).rstrip()
    module = cst.parse_module(text + "\n" if text else "")
    module = cst.ensure_type(module.visit(_Indentation(indent)), cst.Module)
    rows = list(module.body)
    if not rows:
        return [], [*module.header, *module.footer]
    rows[0] = rows[0].with_changes(leading_lines=[*module.header, *rows[0].leading_lines])
    return rows, list(module.footer)


def body_of(rows: Sequence[Row], comments: Sequence[cst.EmptyLine]) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """The body and the footer of a block, which holds at least a `pass`.

    Args:
        rows: The statements of the block.
        comments: The comments behind them.
    """
    if rows:
        return list(rows), list(comments)
    return [cst.SimpleStatementLine([cst.Pass()], leading_lines=comments)], []
