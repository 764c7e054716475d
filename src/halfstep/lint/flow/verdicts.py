"""From traces to findings: what is wrong on every way that it could be wrong on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, final

from halfstep.lint.flow.events import Event, Guard, Kind
from halfstep.lint.values import Scaler

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = ["Verdicts", "asks_about_gradients", "depends", "line_of", "receiver_of", "written_scale", "written_scaler"]

Evidence = TypeVar("Evidence")

_LOOKED_AT = re.compile(r"isfinite|isnan|isinf|norm")


@final
class Verdicts(Generic[Evidence]):
    """Collects, place by place, on which ways it is wrong and on which it is right.

    Two conditions that are spelled differently may always agree, such as `use_amp` and `scaler is not None`: a way on which they do not
    exists on paper only. So a place counts as wrong only where no way was found on which it is right.

    Example:
        >>> verdicts: Verdicts[str] = Verdicts()
        >>> always, sometimes = ast.Pass(), ast.Pass()
        >>> verdicts.wrong(always, "no unscale_()")
        >>> verdicts.wrong(sometimes, "no unscale_()")
        >>> verdicts.right(sometimes)
        >>> [evidence for place, evidence in verdicts.shown()]
        ['no unscale_()']
    """

    def __init__(self) -> None:
        self._wrong: dict[ast.AST, Evidence] = {}
        self._right: set[ast.AST] = set()

    def wrong(self, place: ast.AST, evidence: Evidence) -> None:
        """Notes a way on which a place is wrong; the evidence of the first one is kept."""
        self._wrong.setdefault(place, evidence)

    def right(self, place: ast.AST) -> None:
        """Notes a way on which a place is right."""
        self._right.add(place)

    def all_right(self, places: Iterable[ast.AST]) -> None:
        """Notes a way on which several places are right."""
        self._right.update(places)

    def shown(self) -> Iterator[tuple[ast.AST, Evidence]]:
        """The places that are wrong on all ways, with the evidence."""
        for place, evidence in self._wrong.items():
            if place not in self._right:
                yield place, evidence


def depends(event: Event, on: Event) -> tuple[Guard, ...] | None:
    """The conditions that must hold for an event besides those of another one; `None` where the other stands behind conditions of its own.

    Empty where both always happen together, as far as conditions tell.

    Args:
        event: The event.
        on: The other one.
    """
    return event.guards[len(on.guards) :] if event.guards[: len(on.guards)] == on.guards else None


def asks_about_gradients(guard: Guard) -> bool:
    """Whether a condition looks at the gradients, or at their norm: such a branch leaves a bad batch out."""
    return _LOOKED_AT.search(ast.unparse(guard.test)) is not None


def line_of(event: Event) -> int:
    """The line of an event, from 1."""
    return int(getattr(event.node, "lineno", 0))


def receiver_of(event: Event) -> ast.expr | None:
    """The expression of the scaler, optimizer or other object that the call of an event is made on."""
    call = event.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    inner = call.func.value
    if event.kind is Kind.SCALED_BACKWARD:
        return inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else None
    return inner


def written_scale(scaler: Scaler | None, module: Module) -> str:
    """The first scale of a scaler: the one that it is made with, or torch's 65536.

    Args:
        scaler: The scaler.
        module: The file.
    """
    given = scaler.arguments.get("init_scale") if scaler is not None else None
    value = module.constant(given) if given is not None else 65536
    return f"{value:.6g}" if isinstance(value, int | float) else "65536"


def written_scaler(event: Event) -> str:
    """How the scaler of an event is written there, such as `self.scaler`; empty where that cannot be told."""
    place = receiver_of(event)
    return ast.unparse(place) if place is not None and event.scaler is not None else ""
