"""Runs as tables: epoch by epoch, optimizer by optimizer, and side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

from halfstep.records import EpochSummary, OptimizerSummary
from halfstep.report.document import Column, Table
from halfstep.report.quantities import MISSING, memory_unit, number_text, time_unit
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.wording import duration_text, share_text

__all__ = ["comparison_table", "epoch_table", "optimizer_table", "scale_text"]

# More epochs than this are told several at a time.
_MOST_ROWS: Final = 20


def epoch_table(run: ReportedRun) -> Table:
    """The steps of each epoch of a run, how many were skipped, and what training came to; of each tenth where no epochs are known.

    Args:
        run: The run. Of many epochs, several stand in one row.
    """
    epochs = run.summary.epochs
    has_epochs = any(epoch.epoch is not None for epoch in epochs)
    name = _epoch_name if has_epochs else _part_name
    each = math.ceil(len(epochs) / _MOST_ROWS)
    groups = [epochs[first : first + each] for first in range(0, len(epochs), each or 1)]
    unit = time_unit(epoch.step_time_ms for epoch in epochs)
    columns = (
        "Epoch" if has_epochs else "Steps",
        *(("Steps",) if has_epochs else ()),
        "Skipped",
        "Share",
        "Median loss",
        "Scale at its end",
        f"Step time ({unit.name})",
    )
    captions = (
        "" if has_epochs else "No epochs were recorded, so these are equal parts of the run.",
        f"Of {each} epochs together, losses and times are medians of those of each." if each > 1 else "",
    )
    return Table(
        columns=tuple(Column(header=header, alignment="right") for header in columns),
        rows=tuple((*name(group), *_epoch_cells(group, factor=unit.factor)) for group in groups),
        caption=" ".join(filter(None, captions)),
    )


def _epoch_name(group: Sequence[EpochSummary]) -> tuple[str, ...]:
    numbers = [MISSING if epoch.epoch is None else f"{epoch.epoch:,}" for epoch in (group[0], group[-1])]
    return (numbers[0] if len(group) == 1 else " to ".join(numbers), f"{sum(epoch.steps for epoch in group):,}")


def _part_name(group: Sequence[EpochSummary]) -> tuple[str, ...]:
    first, last = group[0].first_step, group[-1].last_step
    return (f"{first:,}" if first == last else f"{first:,} to {last:,}",)


def _epoch_cells(group: Sequence[EpochSummary], *, factor: float) -> tuple[str, ...]:
    steps, skipped = sum(epoch.steps for epoch in group), sum(epoch.skips for epoch in group)
    time = _median(epoch.step_time_ms for epoch in group)
    return (
        f"{skipped:,}",
        share_text(skipped, steps),
        number_text(_median(epoch.loss for epoch in group)),
        scale_text(group[-1].scale),
        number_text(None if time is None else time * factor, digits=3),
    )


def optimizer_table(run: ReportedRun) -> Table:
    """What the steps of each optimizer of a run come to.

    Args:
        run: The run.
    """
    metrics: tuple[tuple[str, Callable[[OptimizerSummary], str]], ...] = (
        ("Steps", lambda one: f"{one.steps:,}"),
        ("Skipped steps", lambda one: f"{one.skips:,}"),
        ("First loss", lambda one: number_text(one.first_loss)),
        ("Final loss", lambda one: number_text(one.settled_loss)),
        ("Final scale", lambda one: scale_text(one.final_scale)),
        ("Final learning rate", lambda one: number_text(one.final_lr)),
    )
    optimizers = run.summary.optimizers
    names = [one.optimizer or "main" for one in optimizers]
    return Table(
        columns=(Column(header="Optimizer"), *(Column(header=name, alignment="right", role=name) for name in names)),
        rows=tuple((label, *(text(one) for one in optimizers)) for label, text in metrics),
        caption="The final loss is the median of the last 100 steps.",
    )


def comparison_table(runs: Sequence[ReportedRun]) -> Table:
    """Several runs side by side: metrics down, runs across.

    Args:
        runs: The runs.
    """
    time = time_unit(run.summary.median_step_time_ms for run in runs)
    memory = memory_unit(run.summary.peak_memory_mib for run in runs)
    metrics: tuple[tuple[str, Callable[[ReportedRun], str]], ...] = (
        ("Alerts", lambda run: f"{len(run.summary.alerts):,}"),
        ("Precision", lambda run: ", ".join(run.summary.precisions) or MISSING),
        ("Steps", lambda run: f"{run.summary.steps:,}"),
        ("Skipped steps", lambda run: f"{run.summary.skips:,}"),
        ("Share skipped", lambda run: share_text(run.summary.skips, run.summary.steps) or MISSING),
        ("First loss", lambda run: _of_each(run, lambda one: number_text(one.first_loss))),
        ("Final loss", lambda run: _of_each(run, lambda one: number_text(one.settled_loss))),
        ("Lowest loss", lambda run: _of_each(run, lambda one: number_text(one.best_loss))),
        ("Final scale", lambda run: _of_each(run, lambda one: scale_text(one.final_scale))),
        (f"Step time ({time.name})", lambda run: _scaled(run.summary.median_step_time_ms, time.factor)),
        (f"Peak memory ({memory.name})", lambda run: _scaled(run.summary.peak_memory_mib, memory.factor)),
        ("Lasted", _duration),
        ("Ended", _outcome),
    )
    return Table(
        columns=(Column(header="Metric"), *(Column(header=run.name, alignment="right", role=run.role) for run in runs)),
        rows=tuple((name, *(text(run) for run in runs)) for name, text in metrics),
        caption="The final loss is the median of the last 100 steps; step time is the median of the steps that were not skipped.",
    )


def scale_text(scale: float | None) -> str:
    """A loss scale with all its digits: scales are powers of two that people know by heart.

    Example:
        >>> scale_text(65536.0), scale_text(0.5), scale_text(2.0**40)
        ('65,536', '0.5', '1.1e+12')
    """
    if scale is None or not math.isfinite(scale):
        return number_text(scale)
    return f"{scale:,.15g}" if 1e-6 < scale < 1e9 else f"{scale:.3g}"


def _of_each(run: ReportedRun, text: Callable[[OptimizerSummary], str]) -> str:
    return ", ".join(map(text, run.summary.optimizers)) or MISSING


def _scaled(value: float | None, factor: float) -> str:
    return number_text(None if value is None else value * factor)


def _duration(run: ReportedRun) -> str:
    starts, ends = run.summary.starts, run.summary.ends
    return (duration_text(starts[0].time, ends[-1].time) if starts and ends and run.saved.ended[-1] else "") or MISSING


def _outcome(run: ReportedRun) -> str:
    return (run.summary.ends[-1].outcome or "yes") if run.saved.ended[-1] else "not recorded"


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
