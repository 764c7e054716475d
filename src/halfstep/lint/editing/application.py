"""Brings the edits of many fixes into one text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias, final

import libcst as cst

from halfstep.lint.editing.excerpts import Excerpt, excerpts, indentation, step
from halfstep.lint.editing.imports import missing_imports, place_of_import, statement_of
from halfstep.lint.editing.outline import EditError, Outline
from halfstep.lint.editing.pairing import flat, parsed, statement_pairs
from halfstep.lint.editing.plans import plan
from halfstep.lint.editing.rewriting import rewrite
from halfstep.lint.edits import AddImport, Edit
from halfstep.lint.lines import LINE_END

__all__ = ["apply_groups"]

_Group: TypeAlias = tuple[Edit, ...]


def apply_groups(text: str, tree: ast.Module, groups: Sequence[_Group]) -> tuple[str, int]:
    """The text after as many groups of edits as can be applied together, and how many these are.

    Args:
        text: The text of a file.
        tree: Its syntax tree.
        groups: The groups, each to be applied wholly or not at all, the most important ones first.
    """
    outline = Outline(text, tree)
    candidates = [group for group in groups if group]
    while True:
        chosen = _compatible(outline, candidates)
        result = _attempt(outline, chosen) if chosen else text
        if result is not None:
            return result, len(chosen)
        # Those that do not work keep no place from those that they meet.
        faulty = _faulty(outline, chosen, [])
        candidates = [group for group in candidates if not any(group is other for other in faulty)]


def _compatible(outline: Outline, groups: Sequence[_Group]) -> list[_Group]:
    """The groups that do not get into each other's way, the first ones first."""
    chosen: list[_Group] = []
    taken: set[ast.stmt] = set()
    outer: set[ast.stmt] = set()
    for group in groups:
        try:
            touched = {statement for edit in group for statement in outline.touched(edit)}
        except EditError:
            continue
        around = {parent for statement in touched for parent in outline.around(statement)}
        if touched & (taken | outer) or around & taken:
            continue
        chosen.append(group)
        taken |= touched
        outer |= around
    return chosen


def _faulty(outline: Outline, groups: Sequence[_Group], working: list[_Group]) -> list[_Group]:
    """Those of some groups that do not work; the others are added to those that are known to work together."""
    if _attempt(outline, [*working, *groups]) is not None:
        working.extend(groups)
        return []
    if len(groups) == 1:
        return [groups[0]]
    half = len(groups) // 2
    return [*_faulty(outline, groups[:half], working), *_faulty(outline, groups[half:], working)]


def _attempt(outline: Outline, groups: Sequence[_Group]) -> str | None:
    """The text after some groups; `None` where that cannot be done or is no Python."""
    try:
        text = _Edition(outline, [edit for group in groups for edit in group]).text()
    except Exception:
        # Whatever a rule asks for and libcst refuses: a fix that is not made is better than no fix at all.
        return None
    return text if parsed(text) is not None else None


@final
class _Edition:
    """A text with edits."""

    def __init__(self, outline: Outline, edits: Sequence[Edit]) -> None:
        self._outline = outline
        self._newline = _newline(outline.lines[0] if outline.lines else "") or "\n"
        # Each edit with whether what it inserts needs a line of its own.
        self._edits: list[tuple[Edit, bool]] = [(edit, False) for edit in edits if not isinstance(edit, AddImport)]
        self._top: list[str] = []
        self._top_line = 0
        for missing in missing_imports(outline, edits):
            insertion, line = place_of_import(outline, missing)
            if insertion is None:
                self._top.append(statement_of(missing))
                self._top_line = line
            else:
                self._edits.append((insertion, True))

    def text(self) -> str:
        """The text."""
        lines: list[str] = []
        end = 0
        top = self._imports() if self._top else ""
        for excerpt in excerpts(self._outline, [edit for edit, _ in self._edits]):
            if top and self._top_line <= excerpt.first:
                lines += [*self._outline.lines[end : self._top_line], top]
                top, end = "", self._top_line
            lines += [*self._outline.lines[end : excerpt.first], self._rewritten(excerpt)]
            end = excerpt.end
        if top:
            lines += [*self._outline.lines[end : self._top_line], top]
            end = max(end, self._top_line)
        return "".join([*lines, *self._outline.lines[end:]])

    def _imports(self) -> str:
        """The lines of the first imports of a module, set off from what is around them."""
        lines = self._outline.lines
        above = lines[self._top_line - 1] if self._top_line > 0 else ""
        text = self._newline.join([*self._top, ""])
        if above and not above.endswith(("\r", "\n")):
            text = self._newline + text
        if above.strip() and not above.lstrip().startswith("#"):
            text = self._newline + text
        if self._top_line < len(lines) and lines[self._top_line].strip():
            text += self._newline
        return text

    def _rewritten(self, excerpt: Excerpt) -> str:
        text = "".join(self._outline.lines[excerpt.first : excerpt.end])
        # A form feed sets the column back to zero, and libcst would lose it.
        start = indentation(text).rfind("\f") + 1
        lead, text = text[:start], text[start:]
        newline = _newline(text) or self._newline
        nested = bool(indentation(text))
        if nested:
            text = f"if 1:{newline}{text}"
        module = cst.parse_module(text)
        if module.code != text:
            raise EditError(f"libcst does not keep the lines from {excerpt.first + 1} to {excerpt.end} as they are")
        module = module.with_changes(default_newline=newline)
        body = cst.ensure_type(module.body[0], cst.If).body.body if nested else module.body
        pairs = statement_pairs(excerpt.statements, flat(body))
        edits = [(edit, own_line) for edit, own_line in self._edits if self._outline.touched(edit)[0] in pairs]
        changes = plan(self._outline, pairs, edits, indent=step(self._outline, self._outline.touched(edits[0][0])[0]))
        if nested:
            changes.reached.add(id(module.body[0]))
        module = rewrite(module, changes)
        return lead + (_unwrapped(module) if nested else _code(module))


def _newline(text: str) -> str:
    """How the first line of a text ends."""
    end = LINE_END.search(text)
    return end.group() if end is not None else ""


def _code(module: cst.Module) -> str:
    return module.code if module.body or module.header or module.footer else ""


def _unwrapped(module: cst.Module) -> str:
    """The text of the block that the statements of an excerpt were put into."""
    _, end, code = module.code.partition(module.default_newline)
    assert end
    return code
