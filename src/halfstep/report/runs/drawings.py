"""One quantity of the steps of runs, such as the loss, as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np

from halfstep.report.document import Axis, Column, Figure, Scale, Table
from halfstep.report.quantities import MISSING, Unit, number_text
from halfstep.report.runs.downsampling import Floats
from halfstep.report.runs.lines import RunLine, drawn_line

__all__ = ["NO_UNIT", "Drawing", "drawing", "wide_scale"]

# Where the largest value is this many times the smallest, a linear axis shows nothing but the largest.
_LOG_FROM: Final = 30.0

# In so many parts the numbers of a figure are told.
_PARTS: Final = 10

NO_UNIT: Final = Unit(name="", factor=1.0)

# What of a figure depends on all of its values.
_ScaleOf: TypeAlias = Callable[[Sequence[Floats]], Scale]
_UnitOf: TypeAlias = Callable[[Sequence[Floats]], Unit]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """What each line has of a quantity.

    Attributes:
        axis: The vertical axis.
        lines: The lines that have any of it.
        values: Theirs, in the unit of the axis.
    """

    axis: Axis
    lines: tuple[RunLine, ...]
    values: tuple[Floats, ...]

    def figures(self, *, limits: tuple[int, int], is_noisy: bool) -> tuple[Figure, ...]:
        """The figure; none where there is nothing to draw.

        Args:
            limits: The first step that it shows, and the last.
            is_noisy: Whether the middle of some steps says more than each of them.
        """
        series = tuple(
            one for line, values in zip(self.lines, self.values, strict=True) for one in drawn_line(line, values, is_noisy=is_noisy)
        )
        if not series:
            return ()
        figure = Figure(
            title=str(self.axis),
            kind="timeline",
            x=Axis(label="step", limits=limits),
            y=self.axis,
            series=series,
            table=_table(self, limits=limits),
        )
        return (figure,)


def drawing(lines: Sequence[RunLine], field: str, *, label: str, scale: _ScaleOf, unit: _UnitOf = lambda _: NO_UNIT) -> Drawing:
    """What some lines have of a field of the record of a step; those that have nothing of it are left out.

    Args:
        lines: The lines.
        field: The name of the field.
        label: What the axis is called.
        scale: Of the axis, for all values together.
        unit: Of the axis, for all values together; they are those of the record yet.
    """
    known = [(line, values) for line in lines for values in (line.values(field),) if np.isfinite(values).any()]
    one = unit([values for _, values in known])
    scaled = [values * one.factor if one.factor != 1 else values for _, values in known]
    chosen = scale(scaled)
    if chosen in {"log", "log2"}:
        # There is no place for others on such an axis.
        scaled = [np.where(values > 0, values, np.nan) for values in scaled]
    axis = Axis(label=label, unit=one.name, scale=chosen)
    return Drawing(axis=axis, lines=tuple(line for line, _ in known), values=tuple(scaled))


def wide_scale(otherwise: Scale) -> _ScaleOf:
    """Chooses a logarithmic axis where positive values span much.

    Args:
        otherwise: What it chooses for others.
    """

    def chosen(values: Sequence[Floats]) -> Scale:
        finite = [part for part in (one[np.isfinite(one)] for one in values) if len(part)]
        low, high = (float(what([what(part) for part in finite])) if finite else 0.0 for what in (np.min, np.max))
        return "log" if low > 0 and high > _LOG_FROM * low else otherwise

    return chosen


def _table(drawn: Drawing, *, limits: tuple[int, int]) -> Table:
    """The numbers of a figure, part by part: of one line its lowest, middle and highest, of several their middles."""
    first, last = limits
    edges = np.linspace(first, last + 1, min(_PARTS, last - first + 1) + 1).round().astype(np.int64).tolist()
    is_alone = len(drawn.lines) == 1
    names = ("Lowest", "Median", "Highest") if is_alone else tuple(line.name for line in drawn.lines)
    roles = ("",) * 3 if is_alone else tuple(line.role for line in drawn.lines)
    rows = []
    for low, high in pairwise(edges):
        parts = [values[(line.steps >= low) & (line.steps < high)] for line, values in zip(drawn.lines, drawn.values, strict=True)]
        finite = [part[np.isfinite(part)] for part in parts]
        cells = [(what, finite[0]) for what in (np.min, np.median, np.max)] if is_alone else [(np.median, part) for part in finite]
        texts = (number_text(float(what(part))) if len(part) else MISSING for what, part in cells)
        rows.append((f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}", *texts))
    return Table(
        columns=(
            Column(header="Steps"),
            *(Column(header=name, alignment="right", role=role) for name, role in zip(names, roles, strict=True)),
        ),
        rows=tuple(rows),
        caption="" if is_alone else "Medians.",
    )
