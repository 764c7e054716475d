"""The steps of runs as lines of a figure: one for each optimizer of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np
import numpy.typing as npt

from halfstep.report.document import Series
from halfstep.report.runs.downsampling import Floats, Places, kept_places, marked_places, medians
from halfstep.report.runs.positions import step_positions
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.summaries import optimizer_rows

__all__ = ["RunLine", "drawn_line", "event_texts", "run_lines"]

# A line is drawn by the lowest and the highest of so many buckets: a screen has about as many columns.
_BUCKETS: Final = 1000

# Where there are more steps than this, the middle of each bucket is drawn as well, of fewer buckets: it tells what noise hides.
_MANY_STEPS: Final = 1000
_MIDDLES: Final = 250

# The line goes on over steps without a value, unless more follow each other: so many, or this share of all steps.
_BRIDGED: Final = 10
_BRIDGED_SHARE: Final = 0.01

# Steps that go back more often than this belong to no order, and are drawn as they come.
_MOST_PIECES: Final = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLine:
    """The steps of one optimizer of a run.

    Attributes:
        run: The run.
        name: What the legend calls it; empty where there is one line alone.
        role: By which it has its colour.
        rows: The rows of its steps in the run.
        steps: Where its steps stand: at their numbers.
    """

    run: ReportedRun
    name: str
    role: str
    rows: Places
    steps: Places

    def values(self, field: str) -> Floats:
        """What a field of the record of a step holds, as floats; NaN where it is not known."""
        columns = self.run.saved.steps
        values = columns.arrays[field][self.rows].astype(np.float64)
        if field in columns.known:
            values[~columns.known[field][self.rows]] = np.nan
        return values


def run_lines(runs: Sequence[ReportedRun]) -> tuple[RunLine, ...]:
    """The lines of some runs: one for each optimizer of each.

    Args:
        runs: The runs. With several, all lines of a run have one colour; the optimizers of a single run have one each.
    """
    lines = []
    for run in runs:
        rows_of = optimizer_rows(run.saved.steps)
        steps = step_positions(run.saved)
        for optimizer, rows in rows_of.items():
            part = (optimizer or "main") if len(rows_of) > 1 else ""
            name = ", ".join(filter(None, (run.name if len(runs) > 1 else "", part)))
            role = part if part and len(runs) == 1 else run.role
            lines.append(RunLine(run=run, name=name, role=role, rows=rows, steps=steps[rows]))
    return tuple(lines)


def drawn_line(line: RunLine, values: Floats, *, is_noisy: bool) -> tuple[Series, ...]:
    """A line as it is drawn, by at most some two thousand points, every spike included.

    Args:
        line: The line.
        values: Its values, one for each step. What is not finite is left out, and a longer stretch of it is a gap.
        is_noisy: Whether the middle of its steps says more than they do.

    Returns:
        One series; two where there is a line of medians before the steps themselves. None where nothing is finite.
    """
    if not np.isfinite(values).any():
        return ()
    pieces = _pieces(line.steps)
    has_middles = is_noisy and len(values) > _MANY_STEPS
    drawn = [_thinned(line.steps[piece], values[piece], buckets=_share(piece, of=len(values), buckets=_BUCKETS)) for piece in pieces]
    name = line.name or "single step"
    single = _series(drawn, name=f"{line.name}, single step" if line.name and has_middles else name, role=line.role)
    if not has_middles:
        return (single,)
    each = math.ceil(len(values) / _MIDDLES)
    middles = [
        medians(line.steps[piece].astype(np.float64), values[piece], buckets=_share(piece, of=len(values), buckets=_MIDDLES))
        for piece in pieces
    ]
    faint = Series(name=single.name, x=single.x, y=single.y, role=single.role, emphasis="faint")
    return (faint, _series(middles, name=line.name or f"median of {each:,} steps", role=line.role))


def _pieces(steps: Places) -> list[slice]:
    """Stretches in which steps go on: a run that was resumed may do some of them again."""
    backwards = np.flatnonzero(np.diff(steps) <= 0) + 1
    if len(backwards) > _MOST_PIECES:
        return [slice(0, len(steps))]
    edges = [0, *backwards.tolist(), len(steps)]
    return [slice(first, last) for first, last in pairwise(edges)]


def _share(piece: slice, *, of: int, buckets: int) -> int:
    length: int = piece.stop - piece.start
    return max(1, round(buckets * length / of))


def _thinned(steps: Places, values: Floats, *, buckets: int) -> tuple[Floats, Floats]:
    places = kept_places(values, buckets=buckets)
    places = places[np.isfinite(values[places])]
    x, y = steps[places].astype(np.float64), values[places]
    unknown = np.cumsum(~np.isfinite(values))
    gaps = np.flatnonzero(np.diff(unknown[places]) > max(_BRIDGED, _BRIDGED_SHARE * len(values))) + 1
    return np.insert(x, gaps, x[gaps]), np.insert(y, gaps, np.nan)


def _series(pieces: Sequence[tuple[Floats, Floats]], *, name: str, role: str) -> Series:
    x: list[int] = []
    y: list[float] = []
    for piece_x, piece_y in pieces:
        if x and len(piece_x):
            x.append(round(piece_x[0]))
            y.append(math.nan)
        x += piece_x.round().astype(np.int64).tolist()
        y += piece_y.tolist()
    return Series(name=name, x=tuple(x), y=tuple(y), role=role)


def event_texts(line: RunLine, is_marked: npt.NDArray[np.bool_], *, what: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where events of a line are drawn, and what is said of each. Where too many lie beside each other, one stands for several.

    Args:
        line: The line.
        is_marked: In which of its steps there is one.
        what: What it is, such as `skipped`.
    """
    places, counts = marked_places(is_marked, buckets=_BUCKETS)
    size = math.ceil(len(is_marked) / _BUCKETS)
    texts = []
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        last = min((place // size + 1) * size, len(line.steps)) - 1
        many = f"{count:,} of the steps {line.steps[place]:,} to {line.steps[last]:,} {what}"
        text = f"step {line.steps[place]:,} {what}" if count == 1 else many
        texts.append(f"{line.name}: {text}" if line.name else text)
    return tuple(line.steps[places].tolist()), tuple(texts)
