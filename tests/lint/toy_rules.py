"""Rules that object to names: small enough to see what the machinery around rules does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar, final

from halfstep.lint.edits import ReplaceExpression
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix

__all__ = ["BROKEN", "TOYS", "Deep", "Shared", "Wordy"]


def named(module: Module, name: str) -> Iterator[ast.Name]:
    return (node for node in module.nodes(ast.Name) if node.id == name)


@final
class OldName(AbstractRule):
    """A safe fix."""

    code = "HS901"
    name = "old_name"
    severity = "warning"
    summary = "The scaler has an old name."
    explanation = "Nobody knows `old_scaler` any more."
    bad: ClassVar[tuple[Bad, ...]] = (Bad(code="x = 1\nold_scaler.step()\n", line=2, fixed="x = 1\nnew_scaler.step()\n"),)
    good: ClassVar[tuple[str, ...]] = ("new_scaler.step()\n",)

    def check(self, module: Module) -> Iterator[Finding]:
        for node in named(module, "old_scaler"):
            fix = Fix(edits=(ReplaceExpression(node=node, code="new_scaler"),), safety="safe")
            yield Finding(node=node, message=f"{node.id} is old. Write new_scaler.", fix=fix)


@final
class Undecided(AbstractRule):
    """A fix that contains a decision."""

    code = "HS902"
    name = "undecided"
    severity = "error"
    summary = "The scaler | is undecided."
    explanation = "Somebody has to decide."
    bad: ClassVar[tuple[Bad, ...]] = (
        Bad(code="undecided_scaler\n", line=1, fixed="decided_scaler\n"),
        Bad(code="unfixable = undecided_scaler\n", line=1),
    )
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        for node in named(module, "undecided_scaler"):
            fix = Fix(edits=(ReplaceExpression(node=node, code="decided_scaler"),), safety="unsafe")
            is_fixable = isinstance(module.statement(node), ast.Expr)
            yield Finding(node=node, message="It is undecided.", fix=fix if is_fixable else None)


@final
class Talkative(AbstractRule):
    """One that is off by default."""

    code = "HS903"
    name = "talkative"
    severity = "info"
    summary = "Any scaler at all."
    explanation = "For who wants to know."
    bad: ClassVar[tuple[Bad, ...]] = (Bad(code="scaler\n", line=1),)
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        return (Finding(node=node, message="A scaler.") for node in named(module, "scaler"))


@final
class Odd(AbstractRule):
    """Findings at nodes that have no position, and of the whole file."""

    code = "HS904"
    name = "odd"
    severity = "error"
    summary = "Odd nodes."
    explanation = "They are odd."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        if any(named(module, "odd_scaler")):
            yield Finding(node=module.tree, message="The file.")
            yield from (Finding(node=node, message="Arguments.") for node in module.nodes(ast.arguments))


@final
class Breaking(AbstractRule):
    """Its fix is no Python."""

    code = "HS905"
    name = "breaking"
    severity = "error"
    summary = "A fix that breaks."
    explanation = "It breaks."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        for node in named(module, "breaking_scaler"):
            yield Finding(node=node, message="It breaks.", fix=Fix(edits=(ReplaceExpression(node=node, code="1 +"),), safety="safe"))


@final
class Failing(AbstractRule):
    """It fails after its first finding."""

    code = "HS906"
    name = "failing"
    severity = "error"
    summary = "A rule that fails."
    explanation = "It fails."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        for node in named(module, "failing_scaler"):
            yield Finding(node=node, message="It fails.")
            raise ZeroDivisionError("oh")


@final
class Deep(AbstractRule):
    """It goes deeper than Python lets it."""

    code = "HS907"
    name = "deep"
    severity = "error"
    summary = "A rule that goes deep."
    explanation = "It goes deep."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        for _ in named(module, "deep_scaler"):
            yield from self.check(module)


@final
class Wordy(AbstractRule):
    """It names lines."""

    code = "HS908"
    name = "wordy"
    severity = "error"
    summary = "A rule that names lines."
    explanation = "It names lines."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        for node in named(module, "old_scaler"):
            yield Finding(node=node, message=f"`{node.id}` of line {node.lineno}.")


@final
class Shared(AbstractRule):
    """It finds what another rule finds, and has no fix of its own."""

    code = "HS909"
    name = "shared"
    severity = "error"
    summary = "The scaler has an old name."
    explanation = "Another rule fixes it."
    bad: ClassVar[tuple[Bad, ...]] = ()
    good: ClassVar[tuple[str, ...]] = ()

    def check(self, module: Module) -> Iterator[Finding]:
        return (Finding(node=node, message="It is old.") for node in named(module, "old_scaler"))


TOYS = (OldName(), Undecided(), Talkative(), Odd())
BROKEN = (Failing(), *TOYS, Breaking())
