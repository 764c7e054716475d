"""Where a new import goes, and whether it is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from halfstep.lint.editing.outline import Outline, first_line, last_line
from halfstep.lint.editing.pairing import parsed
from halfstep.lint.edits import AddImport, DeleteStatement, Edit, InsertStatement, RemoveImport, ReplaceStatement

__all__ = ["missing_imports", "place_of_import", "statement_of"]

_Import: TypeAlias = ast.Import | ast.ImportFrom
_MUST_BE_FIRST = re.compile(r"#!|[ \t\f]*#.*?coding[:=]")


def statement_of(edit: AddImport) -> str:
    """The text of an import.

    Args:
        edit: What is imported.

    Example:
        >>> statement_of(AddImport(module="torch.amp", name="GradScaler"))
        'from torch.amp import GradScaler'
    """
    return f"from {edit.module} import {edit.name}" if edit.name else f"import {edit.module}"


def missing_imports(outline: Outline, edits: Sequence[Edit]) -> list[AddImport]:
    """Those imports that edits add and that a module will not have, each once, in their order.

    Args:
        outline: The module.
        edits: All edits.
    """
    gone: set[ast.AST] = set()
    names: set[tuple[str, str]] = set()
    for edit in edits:
        if isinstance(edit, RemoveImport):
            gone.add(edit.alias)
        elif isinstance(edit, DeleteStatement | ReplaceStatement) and isinstance(edit.statement, _Import):
            gone.update(edit.statement.names)
        if isinstance(edit, ReplaceStatement | InsertStatement) and "import" in edit.code and outline.block(edit.statement).parent is None:
            new = parsed(edit.code)
            names.update(name for statement in _imports(new.body if new else ()) for name in _names(statement, gone))
    names.update(name for statement in _imports(outline.tree.body) for name in _names(statement, gone))
    wanted = {(edit.module, edit.name): edit for edit in edits if isinstance(edit, AddImport)}
    return sorted((edit for key, edit in wanted.items() if key not in names), key=lambda edit: (bool(edit.name), edit.module, edit.name))


def place_of_import(outline: Outline, edit: AddImport) -> tuple[InsertStatement | None, int]:
    """The statement that an import goes next to; where the module has no imports, `None` and the line, from 0, that it goes before.

    Args:
        outline: The module.
        edit: The import.
    """
    code = statement_of(edit)
    key = (bool(edit.name), edit.module.lower())
    package = edit.module.partition(".")[0]
    relatives = [statement for statement in _imports(outline.tree.body) if _package(statement) == package]
    at_top = [statement for statement in relatives if outline.block(statement).parent is None]
    if relatives := at_top or relatives:
        before = [statement for statement in relatives if _key(statement) <= key]
        if before:
            return InsertStatement(statement=before[-1], code=code, where="after"), 0
        return InsertStatement(statement=relatives[0], code=code, where="before"), 0
    run = _first_run(outline.tree)
    if run:
        absolute = [statement for statement in run if _package(statement) not in ("", "__future__")]
        relative = [statement for statement in run if not _package(statement)]
        if absolute:
            return InsertStatement(statement=absolute[-1], code=code, where="after"), 0
        if relative:
            return InsertStatement(statement=relative[0], code=code, where="before"), 0
        return None, last_line(run[-1]) + 1
    return None, _top(outline)


def _imports(statements: Iterable[ast.stmt]) -> Iterator[_Import]:
    """The imports of a module that are made whenever it is loaded, if they can be."""
    for statement in statements:
        if isinstance(statement, _Import):
            yield statement
        elif isinstance(statement, ast.Try):
            yield from _imports(statement.body)


def _names(statement: _Import, gone: set[ast.AST]) -> Iterator[tuple[str, str]]:
    """What an import makes known under its own name, as module and name."""
    for alias in statement.names:
        if alias in gone:
            continue
        if isinstance(statement, ast.ImportFrom):
            if not statement.level and statement.module and alias.asname in (None, alias.name):
                yield statement.module, alias.name
        elif alias.asname is None:
            parts = alias.name.split(".")
            yield from ((".".join(parts[:length]), "") for length in range(1, len(parts) + 1))


def _package(statement: _Import) -> str:
    if isinstance(statement, ast.ImportFrom):
        return "" if statement.level else (statement.module or "").partition(".")[0]
    return statement.names[0].name.partition(".")[0]


def _key(statement: _Import) -> tuple[bool, str]:
    if isinstance(statement, ast.ImportFrom):
        return True, (statement.module or "").lower()
    return False, statement.names[0].name.lower()


def _first_run(tree: ast.Module) -> list[_Import]:
    """The imports that a module begins with, behind its docstring."""
    run: list[_Import] = []
    for statement in tree.body[_has_docstring(tree) :]:
        if not isinstance(statement, _Import):
            break
        run.append(statement)
    return run


def _has_docstring(tree: ast.Module) -> bool:
    return ast.get_docstring(tree, clean=False) is not None


def _top(outline: Outline) -> int:
    """The line that the first import of a module without imports goes before."""
    body = outline.tree.body
    if _has_docstring(outline.tree):
        return last_line(body[0]) + 1
    if not body:
        return len(outline.lines)
    end = first_line(body[0])
    start = end
    while start > 0 and outline.lines[start - 1].lstrip().startswith("#"):
        start -= 1
    # Comments that begin the file are about the file; a later group of comments is about the statement below it.
    return start if start > 0 else end
