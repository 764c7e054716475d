"""The figures of runs: what happened at which step, in one column for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from halfstep.report.document import Figure, Marks
from halfstep.report.quantities import Unit, memory_unit, time_unit
from halfstep.report.runs.downsampling import Floats
from halfstep.report.runs.drawings import drawing, wide_scale
from halfstep.report.runs.lines import RunLine, run_lines
from halfstep.report.runs.marks import alert_marks, event_marks, nonfinite_losses, nonfinite_norms, resumption_marks, skips, zero_norms
from halfstep.report.runs.reported import ReportedRun

__all__ = ["run_figures"]

_MS: Final = 1e3
_MIB: Final = 2.0**-20


@np.errstate(over="ignore")
def run_figures(runs: Sequence[ReportedRun]) -> tuple[Figure, ...]:
    """Loss, loss scale, gradient norm, step time, memory and learning rate over the steps; what no run knows is left out.

    Args:
        runs: The runs. Several are drawn over each other.
    """
    lines = [line for line in run_lines(runs) if len(line.steps)]
    if not lines:
        return ()
    limits = (min(int(line.steps.min()) for line in lines), max(int(line.steps.max()) for line in lines))
    scaled = [line for line in lines if (line.values("scale") != 1).any()]
    loss = _losses(lines, limits=limits)
    scale = drawing(scaled, "scale", label="Loss scale", scale=lambda _: "log2").figures(limits=limits, is_noisy=False)
    figures = [
        *loss,
        *scale,
        *_norms(lines, limits=limits),
        *drawing(lines, "step_time_s", label="Step time", scale=wide_scale("from_zero"), unit=_time).figures(limits=limits, is_noisy=True),
        *drawing(lines, "memory_bytes", label="Memory", scale=lambda _: "from_zero", unit=_memory).figures(limits=limits, is_noisy=False),
        *drawing(lines, "lr", label="Learning rate", scale=lambda _: "from_zero").figures(limits=limits, is_noisy=False),
    ]
    # What concerns the whole run is told in the figures that people look at first. A skipped step moves the scale, where there is one.
    for place in range(min(len(loss) + len(scale) or 1, len(figures))):
        is_scale = place == (len(loss) if scale else 0)
        figures[place] = _with_events(figures[place], runs, lines if is_scale else ())
    return tuple(figures)


def _with_events(figure: Figure, runs: Sequence[ReportedRun], skipping: Sequence[RunLine]) -> Figure:
    """The figure with the alerts of the runs, the places where they were resumed, and the skipped steps of some lines."""
    told = (
        ("", alert_marks(runs)),
        ("A square: another process went on.", resumption_marks(runs)),
        ("Ticks below: skipped steps.", event_marks(skipping, skips, what="skipped", place="below")),
    )
    return _marked(figure, *told)


def _marked(figure: Figure, *told: tuple[str, tuple[Marks, ...]]) -> Figure:
    captions = (figure.caption, *(caption for caption, marks in told if marks))
    marks = (one for _, some in told for one in some)
    return replace(figure, marks=(*figure.marks, *marks), caption=" ".join(filter(None, captions)))


def _losses(lines: Sequence[RunLine], *, limits: tuple[int, int]) -> tuple[Figure, ...]:
    drawn = drawing(lines, "loss", label="Loss", scale=wide_scale("linear"))
    broken = event_marks(drawn.lines, nonfinite_losses, what="with a loss that is not finite", place="above")
    told = ("Triangles above: losses that are infinite or NaN.", broken)
    return tuple(_marked(figure, told) for figure in drawn.figures(limits=limits, is_noisy=True))


def _norms(lines: Sequence[RunLine], *, limits: tuple[int, int]) -> tuple[Figure, ...]:
    drawn = drawing(lines, "grad_norm", label="Gradient norm", scale=lambda _: "log")
    broken = event_marks(drawn.lines, nonfinite_norms, what="with a norm that is not finite", place="above")
    zero = event_marks(drawn.lines, zero_norms, what="with a norm of zero", place="below")
    told = (("Triangles above: norms that are infinite or NaN.", broken), ("Ticks below: norms of zero.", zero))
    return tuple(_marked(figure, *told) for figure in drawn.figures(limits=limits, is_noisy=True))


def _time(seconds: Sequence[Floats]) -> Unit:
    fitting = time_unit(float(np.nanmedian(one)) * _MS for one in seconds)
    return Unit(name=fitting.name, factor=fitting.factor * _MS)


def _memory(sizes: Sequence[Floats]) -> Unit:
    fitting = memory_unit(float(np.nanmax(one)) * _MIB for one in sizes)
    return Unit(name=fitting.name, factor=fitting.factor * _MIB)
