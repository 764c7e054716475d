"""What `halfstep lint` found in source code, and what it knows about the rules that found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord, Severity

__all__ = ["FixSafety", "RuleRecord", "Violation"]

FixSafety = Literal["safe", "unsafe"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Violation(AbstractRecord):
    """A place in source code that a rule objects to.

    Attributes:
        code: The rule's code, such as `HS002`.
        rule: Its name, such as `clip_before_unscale`.
        path: The file, as it was named on the command line or found below a folder that was.
        line: The line, from 1; in a notebook, within the cell.
        column: The column, from 1, in characters.
        message: What is wrong there and what to do.
        fix: Whether it can be fixed: `safe` cannot break code that works, `unsafe` contains a decision; `None` where no fix is known.
        cell: In a notebook, the number of the cell among all its cells, from 1.

    Example:
        >>> found = Violation(code="HS002", rule="clip_before_unscale", path="train.py", line=50, column=9, message="It is.", fix="safe")
        >>> Violation.from_json(found.to_json()) == found
        True
    """

    code: str
    rule: str
    path: str
    line: int
    column: int
    message: str
    fix: FixSafety | None
    cell: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRecord(AbstractRecord):
    """What a rule of `halfstep lint` is about.

    Attributes:
        code: Its code, such as `HS002`.
        name: Its name, such as `clip_before_unscale`.
        severity: `error` for what breaks a run or its numbers, `warning` for what probably does; `info` is off unless it is selected.
        summary: What is wrong, in one line.
        page: All that there is to say about it, as Markdown.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    page: str
