"""The ways through a function that are followed side by side, and where they are."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, final

from halfstep.lint.flow.assumptions import Assumptions
from halfstep.lint.flow.events import Event, Guard
from halfstep.lint.syntax import Function, Loop
from halfstep.lint.values import Autocast

__all__ = ["Ending", "Frame", "Way", "chosen", "merged", "resumed"]

# How many ways are followed at once. Real loops have a dozen; beyond this, an even choice of them goes on.
_WAYS = 96
# How many are told apart by their assumptions alone.
_DISTINCT = 32

Ending: TypeAlias = Literal["", "break", "continue", "return", "raise"]


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way so far.

    Attributes:
        events: What happened on it.
        assumptions: What its branches take for granted.
        ending: How it leaves the block that is gone through; empty while it goes on.
    """

    events: tuple[Event, ...] = ()
    assumptions: Assumptions = field(default_factory=dict)
    ending: Ending = ""


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """Where the walk is.

    Attributes:
        function: The function; `None` for the module.
        calls: The functions that are gone through, outermost first.
        loops: The loops around.
        guards: The conditions around.
        regions: The autocast regions around.
    """

    function: Function | None = None
    calls: tuple[ast.AST, ...] = ()
    loops: tuple[Loop, ...] = ()
    guards: tuple[Guard, ...] = ()
    regions: tuple[Autocast, ...] = ()

    @property
    def autocast(self) -> Autocast | None:
        """The region in force."""
        return self.regions[-1] if self.regions and self.regions[-1].enabled is not False else None


def merged(ways: Iterable[Way]) -> list[Way]:
    """Each way once. Where there are many, one for each order of events and ending: what its assumptions have in common."""
    distinct = list({(way.events, way.ending, frozenset(way.assumptions.items())): way for way in ways}.values())
    if len(distinct) <= _DISTINCT:
        return distinct
    found: dict[tuple[tuple[Event, ...], Ending], Way] = {}
    for way in distinct:
        key = (way.events, way.ending)
        other = found.get(key)
        if other is None:
            found[key] = way
        else:
            common = {question: held for question, held in way.assumptions.items() if other.assumptions.get(question) is held}
            found[key] = replace(way, assumptions=common)
    return chosen(list(found.values()), _WAYS)


def chosen(ways: list[Way], most: int) -> list[Way]:
    """An even choice of ways."""
    if len(ways) <= most:
        return ways
    return [ways[index * len(ways) // most] for index in range(most)]


def resumed(ways: Iterable[Way], *endings: Ending) -> list[Way]:
    """The ways, with those that left in one of these manners going on."""
    return [replace(way, ending="") if way.ending in endings else way for way in ways]
