"""Applies fixes to text: what they touch changes, all else stays byte for byte.

Each fix is placed in an excerpt, the whole lines of the smallest statements that hold what it touches. Only the excerpts are parsed with
libcst and written anew, so neither the size of the file nor syntax elsewhere in it matters. libcst is loaded with the first fix.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from halfstep.lint.edits import Edit

__all__ = ["Edited", "apply_edits"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    r"""A text after fixes.

    Attributes:
        text: The text; the very same as before where no fix was applied.
        applied: How many fixes were applied.

    Example:
        >>> Edited(text="x = 1\n", applied=0).applied
        0
    """

    text: str
    applied: int


def apply_edits(text: str, tree: ast.Module, groups: Sequence[tuple[Edit, ...]]) -> Edited:
    r"""Applies fixes, each wholly or not at all.

    Where two of them touch the same statement, or one a statement inside one that the other touches, the first wins and the other is
    left out. So is one that cannot be applied, or whose result does not parse.

    Args:
        text: The text of a file.
        tree: Its syntax tree, which the edits point into.
        groups: The fixes, each as its edits, in the order of their importance.

    Example:
        >>> from halfstep.lint.edits import InsertStatement
        >>> text = "scaler.step(optimizer)  # once\nlog()\n"
        >>> tree = ast.parse(text)
        >>> edit = InsertStatement(statement=tree.body[0], code="scaler.update()", where="after")
        >>> print(apply_edits(text, tree, [(edit,)]).text, end="")
        scaler.step(optimizer)  # once
        scaler.update()
        log()
    """
    if not any(groups):
        return Edited(text=text, applied=0)
    from halfstep.lint.editing.application import apply_groups  # noqa: PLC0415 - it loads libcst, and most files need no fix

    text_after, applied = apply_groups(text, tree, groups)
    return Edited(text=text_after, applied=applied)
