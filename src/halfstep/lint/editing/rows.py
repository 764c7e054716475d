"""Writes the statements of one block anew: lines are joined, split, wrapped and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import libcst as cst

from halfstep.lint.editing.changes import Changes, Insertion, Row, StatementChange, body_of, rows_of
from halfstep.lint.editing.pairing import Statement

__all__ = ["BlockWriter", "Tail"]

_UNCHANGED = StatementChange()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What is moved out of a block.

    Attributes:
        rows: The statements.
        comments: The comments behind them.
    """

    rows: Sequence[Row] = ()
    comments: Sequence[cst.EmptyLine] = ()


@final
@dataclass(slots=True, kw_only=True)
class _Frame:
    """A block that is being written.

    Attributes:
        header: Its first line, for one that new code opens; empty for the others.
        above: The comments above it.
        rows: Its statements so far.
    """

    header: str = ""
    above: list[cst.EmptyLine] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


_Trailing: TypeAlias = cst.TrailingWhitespace | None


@final
class BlockWriter:
    """Takes the statements of a block one after the other and writes down what becomes of them.

    Attributes:
        comments: The comments above the next statement; in the end, those that no statement came after.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._frames = [_Frame()]
        self._small: list[cst.BaseSmallStatement] = []
        self._trailing: _Trailing = None
        self._end_of_line: cst.BaseSmallStatement | None = None
        self._moving = False
        self.comments: list[cst.EmptyLine] = []

    def finish(self, footer: Sequence[cst.EmptyLine]) -> tuple[list[Row], Tail]:
        """The statements that stay in the block, and those that are moved behind it.

        Args:
            footer: The comments behind the last statement.
        """
        self.comments.extend(footer)
        if not self._moving:
            return self._frames[0].rows, Tail()
        tail = Tail(rows=self._frames.pop().rows, comments=self.comments)
        self.comments = []
        return self._frames[0].rows, tail

    def compound(self, original: cst.BaseCompoundStatement, updated: cst.BaseCompoundStatement, tail: Tail) -> None:
        """Writes a statement that has blocks.

        Args:
            original: As it was.
            updated: As it is, what is inside of it being changed.
            tail: What is moved out of its block.
        """
        change = self._change(original)
        self.comments.extend(updated.leading_lines)
        self._begin(change, own_line=True)
        if change.replacement is None:
            self._row(updated.with_changes(leading_lines=[]))
        else:
            self._code(change.replacement)
        for row in tail.rows:
            self._row(row)
        self.comments.extend(tail.comments)
        self._end(change, own_line=True)

    def line(self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine) -> None:
        """Writes a line of statements that have no blocks.

        Args:
            original: As it was.
            updated: As it is, what is inside of the statements being changed.
        """
        self.comments.extend(updated.leading_lines)
        self.small(original.body, updated.body, updated.trailing_whitespace)

    def small(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement], trailing: cst.TrailingWhitespace
    ) -> None:
        """Writes statements that share a line.

        Args:
            original: As they were.
            updated: As they are, what is inside of them being changed.
            trailing: The white space and the comment behind them.
        """
        alone = len(original) == 1
        self._end_of_line = updated[-1]
        for number, (old, new) in enumerate(zip(original, updated, strict=True), 1):
            change = self._change(old)
            self._begin(change, own_line=alone)
            self._trailing = trailing if number == len(original) else None
            if change.replacement is None:
                self._small.append(new)
            else:
                self._replace(change.replacement, alone=alone)
            self._end(change, own_line=alone)
        if not alone and self._small:
            self._trailing = trailing
        self._flush()
        self._trailing = None

    def _change(self, statement: Statement) -> StatementChange:
        return self._changes.statements.get(id(statement), _UNCHANGED)

    def _begin(self, change: StatementChange, *, own_line: bool) -> None:
        for insertion in change.before:
            self._insert(insertion, own_line=own_line)
        if change.moves:
            self._flush()
            self._frames.append(_Frame())
            self._moving = True
        for header in change.wrappers:
            self._flush()
            self._frames.append(_Frame(header=header, above=self.comments))
            self.comments = []

    def _end(self, change: StatementChange, *, own_line: bool) -> None:
        for _ in range(change.wrapped):
            self._flush()
            self._close()
        for insertion in change.after:
            self._insert(insertion, own_line=own_line)

    def _insert(self, insertion: Insertion, *, own_line: bool) -> None:
        rows, comments = rows_of(insertion.code, self._changes.indent)
        small = _joinable(rows, comments)
        if small and not own_line and not insertion.own_line:
            self._small.extend(small)
        else:
            self._flush()
            self._rows(rows, comments)

    def _replace(self, code: str, *, alone: bool) -> None:
        rows, comments = rows_of(code, self._changes.indent)
        small = _joinable(rows, comments)
        if small and (not alone or len(rows) == 1):
            self._small.extend(small)
            return
        trailing, self._trailing = self._trailing, None
        if not rows:
            self.comments.extend(comments)
            return
        self._flush()
        if trailing is not None and trailing.comment is not None:
            rows[0] = _with_remark(rows[0], trailing)
        self._rows(rows, comments)

    def _code(self, code: str) -> None:
        self._rows(*rows_of(code, self._changes.indent))

    def _rows(self, rows: Sequence[Row], comments: Sequence[cst.EmptyLine]) -> None:
        for row in rows:
            self._row(row)
        self.comments.extend(comments)

    def _row(self, row: Row) -> None:
        self._frames[-1].rows.append(row.with_changes(leading_lines=[*self.comments, *row.leading_lines]))
        self.comments = []

    def _flush(self) -> None:
        """Ends the line that is being written."""
        if not self._small:
            return
        body = [
            small
            if isinstance(small.semicolon, cst.Semicolon) and small is not self._end_of_line
            else small.with_changes(semicolon=_SEMICOLON)
            for small in self._small[:-1]
        ]
        last = self._small[-1]
        trailing = self._trailing or cst.TrailingWhitespace()
        if last is not self._end_of_line:
            last = last.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            if trailing.comment is not None and not trailing.whitespace.value:
                # It stood behind the semicolon.
                trailing = trailing.with_changes(whitespace=cst.SimpleWhitespace("  "))
        self._row(cst.SimpleStatementLine([*body, last], trailing_whitespace=trailing))
        self._small = []
        self._trailing = None

    def _close(self) -> None:
        """Ends a block that new code opens."""
        frame = self._frames.pop()
        rows, _ = rows_of(f"{frame.header}\n    pass", self._changes.indent)
        body, footer = body_of(frame.rows, self.comments)
        block = cst.IndentedBlock(body, indent=self._changes.indent, footer=footer)
        self.comments = frame.above
        self._row(rows[0].with_changes(body=block))


_SEMICOLON = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))


def _joinable(rows: Sequence[Row], comments: Sequence[cst.EmptyLine]) -> list[cst.BaseSmallStatement]:
    """The statements of new code where they can share a line with others."""
    small: list[cst.BaseSmallStatement] = []
    for row in rows:
        if not isinstance(row, cst.SimpleStatementLine) or row.leading_lines or row.trailing_whitespace.comment is not None:
            return []
        small.extend(row.body)
    return [] if comments else small


def _with_remark(row: Row, trailing: cst.TrailingWhitespace) -> Row:
    """A statement with the comment that stood on the line of another one."""
    if isinstance(row, cst.SimpleStatementLine) and row.trailing_whitespace.comment is None:
        return row.with_changes(trailing_whitespace=trailing)
    if isinstance(row, cst.BaseCompoundStatement) and isinstance(row.body, cst.IndentedBlock) and row.body.header.comment is None:
        return row.with_changes(body=row.body.with_changes(header=trailing))
    return row.with_changes(leading_lines=[*row.leading_lines, cst.EmptyLine(comment=trailing.comment)])
