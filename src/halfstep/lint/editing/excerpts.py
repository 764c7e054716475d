"""The parts of a text that are parsed and written anew for a fix: whole lines of neighbouring statements."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

from halfstep.lint.editing.outline import EditError, Outline, blocks, first_line, last_line
from halfstep.lint.edits import DeleteStatement, Edit, RemoveImport, ReplaceStatement

__all__ = ["Excerpt", "excerpts", "indentation", "step"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Excerpt:
    """Neighbouring statements that share no line with others.

    Attributes:
        statements: The statements.
        first: Their first line, from 0.
        end: The line behind their last one and behind the comments that belong to their blocks.
    """

    statements: Sequence[ast.stmt]
    first: int
    end: int


def indentation(line: str) -> str:
    """The white space that a line begins with.

    Args:
        line: The line.

    Example:
        >>> indentation("    x = 1")
        '    '
    """
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def step(outline: Outline, statement: ast.stmt) -> str:
    """By what a block is indented more than the statement that it belongs to, as it is done around a statement.

    Args:
        outline: The module.
        statement: The statement.
    """
    for node in chain([statement], outline.around(statement), ast.walk(outline.tree)):
        if not isinstance(node, ast.stmt):
            continue
        outer = indentation(outline.lines[first_line(node)])
        for block in blocks(node):
            inner = indentation(outline.lines[first_line(block[0])]) if block and _begins_its_line(outline, block[0]) else ""
            if inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "


def excerpts(outline: Outline, edits: Iterable[Edit]) -> list[Excerpt]:
    """The parts of a text that edits change, in the order of the text.

    Args:
        outline: The module.
        edits: The edits; none of them adds an import.

    Raises:
        EditError: Two of them overlap in a way that has no meaning.
    """
    found = sorted((_whole_lines(outline, _smallest(outline, edit)) for edit in edits), key=_extent)
    merged: list[Sequence[ast.stmt]] = []
    for statements in found:
        if not merged or first_line(statements[0]) > last_line(merged[-1][-1]):
            merged.append(statements)
        elif last_line(statements[-1]) > last_line(merged[-1][-1]):
            merged[-1] = outline.siblings(merged[-1][0], statements[-1])
    return [
        Excerpt(statements=statements, first=first_line(statements[0]), end=_behind_comments(outline, statements)) for statements in merged
    ]


def _extent(statements: Sequence[ast.stmt]) -> tuple[int, int]:
    return first_line(statements[0]), -last_line(statements[-1])


def _smallest(outline: Outline, edit: Edit) -> Sequence[ast.stmt]:
    statements = outline.touched(edit)
    if not statements:
        raise EditError(f"{type(edit).__name__} touches no statement")
    may_empty_its_block = isinstance(edit, DeleteStatement | RemoveImport) or (isinstance(edit, ReplaceStatement) and not edit.code.strip())
    parent = outline.block(statements[0]).parent
    if parent is None or not may_empty_its_block:
        return statements
    return [parent]


def _whole_lines(outline: Outline, statements: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    block = outline.block(statements[0])
    start, stop = block.statements.index(statements[0]), block.statements.index(statements[-1])
    while start > 0 and (
        last_line(block.statements[start - 1]) >= first_line(block.statements[start]) or _continues(outline, block.statements[start])
    ):
        start -= 1
    while stop + 1 < len(block.statements) and (
        first_line(block.statements[stop + 1]) <= last_line(block.statements[stop]) or _continues(outline, block.statements[stop + 1])
    ):
        stop += 1
    first = block.statements[start]
    if block.parent is not None and (not _begins_its_line(outline, first) or outline.is_elif(first)):
        return _whole_lines(outline, [block.parent])
    return block.statements[start : stop + 1]


def _begins_its_line(outline: Outline, statement: ast.stmt) -> bool:
    if hasattr(statement, "decorator_list"):
        return True
    before = outline.lines[statement.lineno - 1].encode()[: statement.col_offset]
    return not before.strip() and not _continues(outline, statement)


def _continues(outline: Outline, statement: ast.stmt) -> bool:
    """Whether a statement begins on a line that continues the one above with a backslash."""
    line = first_line(statement)
    return line > 0 and outline.lines[line - 1].rstrip("\r\n").endswith("\\")


def _behind_comments(outline: Outline, statements: Sequence[ast.stmt]) -> int:
    """The line behind the statements and the comments below them that are indented as the last block is."""
    end = last_line(statements[-1]) + 1
    inner = _last_block(outline, statements[-1])
    if not inner or not _begins_its_line(outline, inner[0]):
        return end
    own = _width(outline.lines[first_line(inner[0])])
    for number in range(end, len(outline.lines)):
        line = outline.lines[number]
        if not line.strip():
            continue
        if not line.lstrip().startswith("#") or _width(line) < own:
            break
        end = number + 1
    return end


def _last_block(outline: Outline, statement: ast.stmt) -> Sequence[ast.stmt]:
    inner = [block for block in blocks(statement) if block]
    if not inner:
        return ()
    return _last_block(outline, inner[-1][0]) if outline.is_elif(inner[-1][0]) else inner[-1]


def _width(line: str) -> int:
    return len(indentation(line).expandtabs(8))
