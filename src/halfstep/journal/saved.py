"""A run that was read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from halfstep.journal.columns import StepColumns
from halfstep.records import Action, Alert, RunRecord, StepRecord

__all__ = ["SavedRun"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRun:
    """A run, as it lies in its folder.

    A run that was resumed has a segment for each process that recorded it.

    Attributes:
        folder: Where it lies.
        name: What it is called by: the name of its folder.
        starts: That each process began.
        ends: That processes ended. One that was killed has none.
        steps: The steps, field by field.
        alerts: The alerts, as they were raised.
        actions: What was done because of them.
        notes: What could not be read, in words, and which lines that is about.
        segments: Of each segment, the index of its first step.
        ended: Of each segment, whether it ended in good order.
        alert_rows: Of each alert, how many steps were recorded before it.
        alert_segments: Of each alert, the index of the segment that it belongs to.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.journal import RunWriter, read_run
        >>> record = StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
        ...     precision="bf16")
        >>> writer = RunWriter(mkdtemp())
        >>> writer.write([record])
        >>> run = read_run(writer.path.parent)
        >>> len(run.steps), run.steps.loss.mean(), run.segments, run.ended
        (1, np.float64(0.25), (0,), (False,))
    """

    folder: Path
    name: str
    starts: tuple[RunRecord, ...]
    ends: tuple[RunRecord, ...]
    steps: StepColumns
    alerts: tuple[Alert, ...]
    actions: tuple[Action, ...]
    notes: tuple[str, ...]
    segments: tuple[int, ...]
    ended: tuple[bool, ...]
    alert_rows: tuple[int, ...]
    alert_segments: tuple[int, ...]

    def records(self, first: int = 0, last: int | None = None) -> Iterator[StepRecord]:
        """The records of some steps, made one by one.

        Args:
            first: The index of the first one.
            last: The index after the last one; `None` for all.
        """
        return self.steps.records(first, last)
