"""The figures of a comparison: loss curves, step times, and what the peak memory is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import quantiles

from halfstep.records import MemoryParts, Settings
from halfstep.report.contenders import Contender
from halfstep.report.document import Axis, Column, Figure, Scale, Series, Table
from halfstep.report.quantities import MISSING, memory_unit, number_text, time_unit

__all__ = ["loss_figure", "memory_figure", "step_time_figure"]

# Where the largest value is this many times the smallest, a linear axis shows nothing but the largest.
_LOG_FROM = 30.0

_LOSS_ROWS = 8

_PARTS: tuple[tuple[str, Callable[[MemoryParts], float]], ...] = (
    ("Parameters", lambda parts: parts.parameters),
    ("Optimizer state", lambda parts: parts.optimizer),
    ("Batch", lambda parts: parts.batch),
    ("Step", lambda parts: parts.step),
)


def _scale(values: Iterable[float]) -> Scale:
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0:
        return "linear"
    return "log" if max(finite) > _LOG_FROM * min(finite) else "linear"


def _across(first: str, runs: Sequence[Contender], rows: Iterable[tuple[str, ...]]) -> Table:
    columns = (Column(header=first), *(Column(header=one.label, alignment="right", role=one.label) for one in runs))
    return Table(columns=columns, rows=tuple(rows))


def loss_figure(runs: Sequence[Contender], *, settings: Settings) -> tuple[Figure, ...]:
    """The loss of each precision over the steps: the mean over the seeds, the seeds behind it, and the skipped steps.

    Args:
        runs: The contenders, the baseline first.
        settings: How they were run, which tells the names of the seeds.

    Returns:
        One figure, or none when there are no losses.

    Example:
        >>> settings = Settings(steps=1, warmup=0, seeds=(0,), batch_size=1, channels_last=False, compile=False, loss_scale="none")
        >>> loss_figure((), settings=settings)
        ()
    """
    shown = [one for one in runs if any(one.run.losses)]
    if not shown:
        return ()
    series = [line for one in shown for line in _loss_series(one, settings=settings)]
    marked = any(line.emphasis == "marks" for line in series)
    captions = ["Bold lines are means over the seeds, faint lines are single seeds." if len(settings.seeds) > 1 else ""]
    captions.append("A cross marks a skipped step." if marked else "")
    captions.extend(_broken_loss(one, settings=settings) for one in shown)
    figure = Figure(
        title="Loss at each step, warm-up included",
        kind="lines",
        x=Axis(label="Step"),
        y=Axis(label="Loss", scale=_scale(value for line in series for value in line.y)),
        series=tuple(series),
        caption=" ".join(caption for caption in captions if caption),
        table=_loss_table(shown),
    )
    return (figure,)


def _mean_loss(one: Contender) -> tuple[float, ...]:
    # A seed that an interruption cut short would make the mean jump where it ends, so only the longest seeds count.
    longest = max(map(len, one.run.losses))
    seeds = [losses for losses in one.run.losses if len(losses) == longest]
    return tuple(sum(values) / len(values) for values in zip(*seeds, strict=True))


def _loss_series(one: Contender, *, settings: Settings) -> list[Series]:
    mean = _mean_loss(one)
    steps = tuple(range(1, len(mean) + 1))
    lines = []
    if len(one.run.losses) > 1:
        for place, losses in enumerate(one.run.losses):
            name = f"{one.label}, {_seed_name(place, settings=settings)}"
            lines.append(Series(name=name, x=steps[: len(losses)], y=losses, role=one.label, emphasis="faint"))
    lines.append(Series(name=one.label, x=steps, y=mean, role=one.label))
    marks = [
        (step, _nearest_finite(losses, step))
        for losses, skipped in zip(one.run.losses, one.run.skipped_at, strict=False)
        for step in skipped
        if 1 <= step <= len(losses)
    ]
    if marks:
        xs, ys = zip(*marks, strict=True)
        lines.append(Series(name=f"{one.label} skipped steps", x=xs, y=ys, role=one.label, emphasis="marks"))
    return lines


def _nearest_finite(losses: Sequence[float], step: int) -> float:
    """The loss at a step, or else the last finite one before it, so that a skip is seen even where the loss overflowed too."""
    before = [value for value in losses[:step] if math.isfinite(value)]
    after = [value for value in losses[step:] if math.isfinite(value)]
    return before[-1] if before else after[0] if after else math.nan


def _seed_name(place: int, *, settings: Settings) -> str:
    return f"seed {settings.seeds[place] if place < len(settings.seeds) else place}"


def _broken_loss(one: Contender, *, settings: Settings) -> str:
    for place, losses in enumerate(one.run.losses):
        step = next((number for number, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
        if step is not None:
            return f"The loss of {one.label} was {number_text(losses[step - 1])} at step {step} of {_seed_name(place, settings=settings)}."
    return ""


def _loss_table(runs: Sequence[Contender]) -> Table:
    means = [_mean_loss(one) for one in runs]
    last = max(map(len, means))
    rows = min(_LOSS_ROWS, last)
    steps = sorted({1 + round(place * (last - 1) / max(1, rows - 1)) for place in range(rows)})
    texts = ((str(step), *(number_text(mean[step - 1]) if step <= len(mean) else MISSING for mean in means)) for step in steps)
    return _across("Step", runs, texts)


def step_time_figure(runs: Sequence[Contender]) -> tuple[Figure, ...]:
    """How the step times of each precision are distributed.

    Args:
        runs: The contenders, the baseline first.

    Returns:
        One figure, or none when no step was timed.

    Example:
        >>> step_time_figure(())
        ()
    """
    timed = [(one, [time for time in one.run.step_times_ms if math.isfinite(time)]) for one in runs]
    timed = [(one, times) for one, times in timed if times]
    if not timed:
        return ()
    unit = time_unit(time for _, times in timed for time in times)
    series = tuple(Series(name=one.label, y=tuple(time * unit.factor for time in times), role=one.label) for one, times in timed)
    figure = Figure(
        title="Time of every measured step",
        kind="distribution",
        x=Axis(label="Step time", unit=unit.name, scale=_scale(time for line in series for time in line.y)),
        y=Axis(label="Precision"),
        series=series,
        caption="Boxes span the middle half of the steps, with a line at the median.",
        table=_quantile_table([one for one, _ in timed], series=series, unit=unit.name),
    )
    return (figure,)


def _quantile_table(runs: Sequence[Contender], *, series: Sequence[Series], unit: str) -> Table:
    names = ("Fastest", "Lower quartile", "Median", "Upper quartile", "Slowest")
    columns = []
    for line in series:
        lower, middle, upper = quantiles(line.y, n=4, method="inclusive") if len(line.y) > 1 else line.y * 3
        columns.append((min(line.y), lower, middle, upper, max(line.y)))
    rows = ((f"{name} ({unit})", *(number_text(column[place]) for column in columns)) for place, name in enumerate(names))
    return _across("Step time", runs, (*rows, ("Steps", *(str(len(line.y)) for line in series))))


def memory_figure(runs: Sequence[Contender]) -> tuple[Figure, ...]:
    """What the peak memory of each precision is made of.

    Args:
        runs: The contenders, the baseline first.

    Returns:
        One figure, or none when no memory was measured.

    Example:
        >>> memory_figure(())
        ()
    """
    parts = [(one, one.run.memory) for one in runs if one.run.memory is not None]
    if not parts:
        return ()
    unit = memory_unit(one.run.peak_memory_mib for one, _ in parts)
    labels = tuple(one.label for one, _ in parts)
    series = tuple(
        Series(name=name, x=labels, y=tuple(part(memory) * unit.factor for _, memory in parts), role=name) for name, part in _PARTS
    )
    figure = Figure(
        title="Peak memory of one step, by what holds it",
        kind="stacked_bars",
        x=Axis(label="Peak memory", unit=unit.name),
        y=Axis(label="Precision"),
        series=series,
        caption="“Step” is what the step itself held at its peak: activations, gradients, casts and temporaries.",
        table=_across(
            f"Part ({unit.name})",
            [one for one, _ in parts],
            ((line.name, *(number_text(value) for value in line.y)) for line in series),
        ),
    )
    return (figure,)
