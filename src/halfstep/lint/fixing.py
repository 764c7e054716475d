"""Fixes what is found in a text, and what the fixes bring to light, until nothing changes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from halfstep.lint.editing import apply_edits
from halfstep.lint.rules.rule import Finding, Safety

__all__ = ["Checked", "FixedText", "fix_text"]

_PASSES = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checked:
    """What was found in a text.

    Attributes:
        tree: The syntax tree that was checked, which the findings point into.
        findings: What was found; where two fixes meet, the first one wins.

    Example:
        >>> Checked(tree=ast.parse("x = 1"), findings=()).findings
        ()
    """

    tree: ast.Module
    findings: Sequence[Finding]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedText:
    """A text after all fixes.

    Attributes:
        text: The text; the very same as before where nothing was fixed.
        applied: How many fixes were applied.
        passes: How often the text was changed.

    Example:
        >>> FixedText(text="x = 1", applied=0, passes=0).text
        'x = 1'
    """

    text: str
    applied: int
    passes: int


def fix_text(text: str, *, check: Callable[[str], Checked], allowed: frozenset[Safety]) -> FixedText:
    """Applies fixes until none is left or nothing changes, at most ten times.

    Fixes of statements that lie in each other wait for each other, and a fix may uncover the next finding, so the text is checked again
    after each pass. Fixes that undo each other end with the text that came last before one that was there already. What is still found
    in the result is for the caller to ask.

    Args:
        text: The text of a file.
        check: What finds mistakes in a text. Where the text does not parse, it finds nothing.
        allowed: Which fixes are applied.

    Example:
        >>> from halfstep.lint.edits import ReplaceExpression
        >>> from halfstep.lint.rules.rule import Fix
        >>> def check(text: str) -> Checked:
        ...     tree = ast.parse(text)
        ...     ones = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == 1]
        ...     fixes = [Fix(edits=(ReplaceExpression(node=node, code="2"),), safety="safe") for node in ones]
        ...     return Checked(tree=tree, findings=[Finding(node=ones[0], message="one", fix=fix) for fix in fixes])
        >>> fix_text("x = 1 + 1", check=check, allowed=frozenset({"safe"}))
        FixedText(text='x = 2 + 2', applied=2, passes=2)
    """
    seen = {text}
    applied = passes = 0
    while passes < _PASSES:
        checked = check(text)
        groups = [finding.fix.edits for finding in checked.findings if finding.fix is not None and finding.fix.safety in allowed]
        edited = apply_edits(text, checked.tree, groups)
        if edited.text in seen:
            break
        seen.add(edited.text)
        text = edited.text
        applied += edited.applied
        passes += 1
    return FixedText(text=text, applied=applied, passes=passes)
