"""What a case is: a training loop as its users write it, whose lines say which alerts must name them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

__all__ = ["RULES", "Case", "Loop", "Mark", "case"]

# The rules whose alerts name a line of the loop.
RULES = (
    "autocast_device_mismatch",
    "backward_in_autocast",
    "clip_before_unscale",
    "fp16_without_scaler",
    "loop_inside_autocast",
    "missing_update",
    "nonfinite_buffers",
    "optimizer_step_bypasses_scaler",
    "repeated_update",
    "scaled_norm_logged",
    "scaler_created_in_loop",
    "scaler_unused",
    "scaler_with_bf16",
    "schedule_moved_on_skip",
    "stale_parameters",
    "state_saved_before_update",
    "unscaled_backward",
)

# Trains, and returns the losses that it saw.
Loop = Callable[..., list[float]]

_MARK = re.compile(r"# alert: (?P<marks>[\w@., ]+)$")


class Mark(NamedTuple):
    """An alert, and the line that it must name.

    Attributes:
        rule: Its rule.
        file: The name of the file, without folders.
        line: The line.
        module: The path of the module that it must name; `None` where that is not compared.
    """

    rule: str
    file: str
    line: int
    module: str | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training loop, and what to expect of it.

    A line that ends with `# alert: RULE` is one that an alert must name; `RULE@PATH` names a module as well, and several are separated by
    commas. A loop without such a line is correct: it trains, and nothing may be said of it.

    Attributes:
        loop: Trains, and returns losses.
        before: What makes the arguments of `loop`, before anybody watches.
        through: Functions and classes beside it whose lines are marked as well, since it calls them.
        also: Rules that may be alerted, too, since they are as true.
        raises: What torch raises in the end; `None` for nothing.
        match: A pattern of its message.
        ignores: Patterns of warnings of torch's own.
    """

    loop: Loop
    before: Callable[[], tuple[Any, ...]]
    through: tuple[Any, ...]
    also: frozenset[str]
    raises: type[Exception] | None
    match: str
    ignores: tuple[str, ...]

    def __str__(self) -> str:
        rules = sorted({mark.rule for mark in self.marks})
        return f"{'+'.join(rules) or 'correct'}: {self.loop.__name__.replace('_', ' ')}"

    @property
    def marks(self) -> frozenset[Mark]:
        """The alerts that it must raise."""
        return frozenset(mark for source in (self.loop, *self.through) for mark in _marks_in(source))

    @property
    def correct(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.marks


def case(
    *,
    before: Callable[[], tuple[Any, ...]] = tuple,
    through: tuple[Any, ...] = (),
    also: Iterable[str] = (),
    raises: type[Exception] | None = None,
    match: str = "",
    ignores: tuple[str, ...] = (),
) -> Callable[[Loop], Case]:
    """Makes a case of a loop; see there for the arguments."""

    def make(loop: Loop) -> Case:
        return Case(loop=loop, before=before, through=through, also=frozenset(also), raises=raises, match=match, ignores=ignores)

    return make


@cache
def _marks_in(source: Any) -> tuple[Mark, ...]:
    lines, first = inspect.getsourcelines(source)
    file = Path(inspect.getsourcefile(source) or "").name
    marks = []
    for number, line in enumerate(lines, start=first):
        found = _MARK.search(line.rstrip())
        for entry in found["marks"].split(",") if found else ():
            rule, _, module = entry.strip().partition("@")
            marks.append(Mark(rule, file, number, module or None))
    return tuple(marks)
