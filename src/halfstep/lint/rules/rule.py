"""What a rule is: its name, why it exists, examples that are its tests and its documentation, and the check itself."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from halfstep.lint.edits import Edit
from halfstep.lint.module import Module
from halfstep.records import FixSafety as Safety
from halfstep.records import Severity

__all__ = ["AbstractRule", "Bad", "Finding", "Fix", "Safety", "Severity"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fix:
    """How a finding is mended: all of the edits or none of them.

    Attributes:
        edits: What becomes of the file.
        safety: `safe` where the correction follows from the finding alone and cannot break code that works; `unsafe` where it contains a
            decision that a person should look at.
    """

    edits: tuple[Edit, ...]
    safety: Safety


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """A place that a rule objects to.

    Attributes:
        node: The part of the syntax tree whose beginning is shown.
        message: What is wrong there and what to do, in the names of the checked file.
        fix: How to mend it; `None` where that is not known.
    """

    node: ast.AST
    message: str
    fix: Fix | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """Code that a rule objects to, once.

    Attributes:
        code: The code.
        line: The line of the finding, from 1.
        fixed: The code after the fix; `None` where no fix is offered.
    """

    code: str
    line: int
    fixed: str | None = None


class AbstractRule(ABC):
    """One mistake that is visible in source code.

    A rule is named after the bad pattern. It knows the module that it checks and nothing of other rules, of files or of output.

    Attributes:
        code: Its short name, such as `HS002`.
        name: Its name, such as `clip_before_unscale`.
        severity: `error` for what breaks a run or its numbers, `warning` for what probably does; `info` is off unless it is selected.
        summary: What is wrong, in one line.
        explanation: Why it breaks and what to do about it, and when the fix is safe, as Markdown.
        bad: Code that violates this rule alone, each once, and what it becomes.
        good: Code that looks alike and is right.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    summary: ClassVar[str]
    explanation: ClassVar[str]
    bad: ClassVar[tuple[Bad, ...]]
    good: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, module: Module) -> Iterator[Finding]:
        """Yields a finding for each place in the module that this rule objects to."""
