"""What happened in runs at single steps, as marks in figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from halfstep.records import Severity
from halfstep.report.document import MarkPlace, Marks, Tone
from halfstep.report.runs.lines import RunLine, event_texts
from halfstep.report.runs.positions import alert_positions, step_positions
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.summaries import broken_losses

__all__ = ["SEVERITY_TONES", "alert_marks", "event_marks", "nonfinite_losses", "nonfinite_norms", "resumption_marks", "skips", "zero_norms"]

SEVERITY_TONES: Final[dict[Severity, Tone]] = {"info": "neutral", "warning": "warning", "error": "bad"}

Found: TypeAlias = Callable[[RunLine], npt.NDArray[np.bool_]]


def alert_marks(runs: Sequence[ReportedRun]) -> tuple[Marks, ...]:
    """The alerts of runs. Those of a single run have the colours of their severity, those of several that of their run.

    Args:
        runs: The runs.
    """
    marks = []
    for run in runs:
        placed = list(zip(alert_positions(run.saved, run.summary.alerts), run.summary.alerts, strict=True))
        before = f"{run.name}: " if len(runs) > 1 else ""
        for severity, tone in SEVERITY_TONES.items():
            found = [(x, f"{before}{alert.rule} ({severity}), step {alert.step:,}") for x, alert in placed if alert.severity == severity]
            if found:
                x, texts = zip(*found, strict=True)
                role = run.role if len(runs) > 1 else ""
                marks.append(Marks(name=f"{before}{severity}", x=x, texts=texts, place="throughout", tone=tone, role=role))
    return tuple(marks)


def resumption_marks(runs: Sequence[ReportedRun]) -> tuple[Marks, ...]:
    """Where another process went on with a run.

    Args:
        runs: The runs.
    """
    marks = []
    for run in runs:
        steps = step_positions(run.saved)
        x = tuple(int(steps[row]) for row in run.saved.segments[1:] if row < len(steps))
        before = f"{run.name}: " if len(runs) > 1 else ""
        if x:
            texts = (f"{before}resumed by another process",) * len(x)
            role = run.role if len(runs) > 1 else ""
            marks.append(Marks(name=f"{before}resumed", x=x, texts=texts, place="between", tone="good", role=role))
    return tuple(marks)


def event_marks(lines: Sequence[RunLine], found: Found, *, what: str, place: MarkPlace) -> tuple[Marks, ...]:
    """Steps in which something happened, each of them, or one for several that lie beside each other.

    Args:
        lines: The lines.
        found: Tells in which steps of a line it did.
        what: What it is, to be said after the number of the step.
        place: Where the marks are.
    """
    marks = []
    for line in lines:
        is_marked = found(line)
        if is_marked.any():
            x, texts = event_texts(line, is_marked, what=what)
            # Without a name it is the only line, and has the colour of what went wrong.
            marks.append(Marks(name=line.name or what, x=x, texts=texts, place=place, tone="bad", role=line.role if line.name else ""))
    return tuple(marks)


def skips(line: RunLine) -> npt.NDArray[np.bool_]:
    """Which steps of a line were skipped."""
    skipped: npt.NDArray[np.bool_] = line.run.saved.steps.skipped[line.rows]
    return skipped


def nonfinite_losses(line: RunLine) -> npt.NDArray[np.bool_]:
    """Which steps of a line have a loss that is infinite or NaN."""
    return broken_losses(line.values("loss"), line.values("grad_norm"))


def nonfinite_norms(line: RunLine) -> npt.NDArray[np.bool_]:
    """Which steps of a line have a gradient norm that is known, and is infinite or NaN."""
    is_known: npt.NDArray[np.bool_] = line.run.saved.steps.known["grad_norm"][line.rows]
    return is_known & ~np.isfinite(line.values("grad_norm"))


def zero_norms(line: RunLine) -> npt.NDArray[np.bool_]:
    """Which steps of a line have gradients that are all zero."""
    is_zero: npt.NDArray[np.bool_] = line.values("grad_norm") == 0
    return is_zero
