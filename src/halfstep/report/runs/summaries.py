"""The numbers of a saved run that a person asks for first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from halfstep.journal import SavedRun, StepColumns
from halfstep.records import Alert, EpochSummary, OptimizerSummary, RunSummary
from halfstep.report.runs.downsampling import Floats, Places

__all__ = ["broken_losses", "optimizer_rows", "run_summary"]

# Losses of single steps vary; the middle of so many tells where a run has come to.
_SETTLED: Final = 100

# A run that knows of no epochs is told in so many parts.
_PARTS: Final = 10


@np.errstate(over="ignore")
def run_summary(saved: SavedRun, *, name: str | None = None, judged: Sequence[Alert] | None = None) -> RunSummary:
    """What a saved run comes to.

    Args:
        saved: The run.
        name: What to call it; `None` for the name of its folder.
        judged: The alerts of a later judgement; `None` for those of the run itself.
    """
    steps = saved.steps
    memory = steps.memory_bytes[steps.memory_bytes >= 0]
    return RunSummary(
        name=saved.name if name is None else name,
        folder=str(saved.folder),
        starts=saved.starts,
        ends=saved.ends,
        precisions=steps.names["precision"],  # type: ignore[arg-type] # they are in the order of their first steps
        steps=len(steps),
        skips=int(steps.skipped.sum()),
        nonfinite_losses=sum(int(broken_losses(steps.loss[rows], steps.grad_norm[rows]).sum()) for rows in optimizer_rows(steps).values()),
        median_step_time_ms=_step_time(steps, np.arange(len(steps))),
        peak_memory_mib=float(memory.max()) / 2**20 if len(memory) else None,
        optimizers=tuple(_optimizer(steps, rows, name=optimizer) for optimizer, rows in optimizer_rows(steps).items()),
        epochs=tuple(_epoch(steps, rows, epoch=epoch) for epoch, rows in _epochs(steps)),
        alerts=saved.alerts if judged is None else tuple(judged),
        recorded_alerts=None if judged is None else saved.alerts,
        actions=saved.actions,
        notes=saved.notes,
    )


def optimizer_rows(steps: StepColumns) -> dict[str, Places]:
    """The rows of the steps of each optimizer, by its name, in the order of their first steps.

    Args:
        steps: The steps of a run.
    """
    names = steps.names["optimizer"]
    if len(names) < 2:
        return dict.fromkeys(names, np.arange(len(steps)))
    return {name: np.flatnonzero(steps.optimizer == code) for code, name in enumerate(names)}


def broken_losses(loss: Floats, norm: Floats) -> npt.NDArray[np.bool_]:
    """Which losses are infinite or NaN.

    A NaN stands for a loss that nobody knows where none was finite before, and where the gradients are finite, which they are not of a
    loss that is NaN.

    Args:
        loss: The losses of one optimizer, in the order of its steps.
        norm: The norm of the gradients in each step, NaN where it is not known.

    Example:
        >>> broken_losses(np.array([np.nan, 0.5, np.nan, np.nan, np.inf]), np.array([np.nan, 1.0, np.nan, 1.0, 1.0])).tolist()
        [False, False, True, False, True]
    """
    was_known = np.logical_or.accumulate(np.isfinite(loss))
    is_broken: npt.NDArray[np.bool_] = np.isinf(loss) | (np.isnan(loss) & was_known & ~np.isfinite(norm))
    return is_broken


def _optimizer(steps: StepColumns, rows: Places, *, name: str) -> OptimizerSummary:
    loss, scale = steps.loss[rows], steps.scale[rows]
    finite = rows[np.isfinite(loss)]
    known = steps.loss[finite]
    best = int(known.argmin()) if len(known) else None
    return OptimizerSummary(
        optimizer=name,
        steps=len(rows),
        skips=int(steps.skipped[rows].sum()),
        first_loss=_of(known, lambda losses: losses[0]),
        last_loss=_of(known, lambda losses: losses[-1]),
        best_loss=_of(known, np.min),
        best_step=None if best is None else int(steps.step[finite[best]]),
        settled_loss=_of(known[-_SETTLED:], np.median),
        final_scale=float(scale[-1]) if (scale != 1.0).any() else None,
        final_lr=float(steps.lr[rows[-1]]),
    )


def _epochs(steps: StepColumns) -> Iterator[tuple[int | None, Places]]:
    """The rows of each epoch, with its number; of each part where there are no epochs."""
    if (steps.epoch < 0).all():
        yield from ((None, rows) for rows in np.array_split(np.arange(len(steps)), min(_PARTS, len(steps)) or 1) if len(rows))
        return
    order = np.argsort(steps.epoch, kind="stable")
    numbers, firsts = np.unique(steps.epoch[order], return_index=True)
    yield from ((int(number) if number >= 0 else None, rows) for number, rows in zip(numbers, np.split(order, firsts[1:]), strict=True))


def _epoch(steps: StepColumns, rows: Places, *, epoch: int | None) -> EpochSummary:
    loss = steps.loss[rows]
    return EpochSummary(
        epoch=epoch,
        first_step=int(steps.step[rows].min()),
        last_step=int(steps.step[rows].max()),
        steps=len(rows),
        skips=int(steps.skipped[rows].sum()),
        loss=_of(loss[np.isfinite(loss)], np.median),
        scale=float(steps.scale[rows[-1]]),
        step_time_ms=_step_time(steps, rows),
    )


def _step_time(steps: StepColumns, rows: Places) -> float | None:
    """The median time of these steps in milliseconds. In a skipped one no optimizer ran, so it is quicker than what training costs."""
    times = steps.step_time_s[rows] * 1e3
    return _of(times[np.isfinite(times) & (times > 0) & ~steps.skipped[rows]], np.median)


def _of(values: Floats, what: Callable[[Floats], float]) -> float | None:
    return float(what(values)) if len(values) else None
