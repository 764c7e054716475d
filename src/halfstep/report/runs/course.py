"""How runs began, went on and ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from halfstep.records import RunRecord
from halfstep.report.document import Item
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.wording import duration_text, time_text

__all__ = ["course_items"]

# A run that was resumed more often is told by its first processes and its last ones.
_FIRST, _LAST = 3, 3

_NO_END: Final = "No end was recorded: it was killed, or is still running."
_KILLED: Final = "No end was recorded: it was killed."


def course_items(run: ReportedRun) -> tuple[Item, ...]:
    """What was run, where its record lies, and how each of its processes began and ended.

    Args:
        run: The run.
    """
    commands = list(dict.fromkeys(start.command for start in run.summary.starts if start.command))
    processes = list(_processes(run))
    left_out = len(processes) - _FIRST - _LAST
    if left_out > 1:
        note = Item(label="…", text=f"{left_out} more processes resumed it.")
        processes = [*processes[:_FIRST], (note,), *processes[-_LAST:]]
    return (
        *(Item(label="Command", text=command) for command in commands[:_FIRST]),
        *(item for items in processes for item in items),
        Item(label="Folder", text=run.summary.folder),
    )


def _processes(run: ReportedRun) -> Iterator[tuple[Item, ...]]:
    """What there is to say of each process that recorded the run."""
    saved = run.saved
    # The first line of a run may be lost, and the start of its first process with it.
    starts = [None] * (len(saved.segments) - len(saved.starts)) + list(saved.starts)
    ends = iter(saved.ends)
    for place, (start, has_ended) in enumerate(zip_longest(starts, saved.ended)):
        end = next(ends, None) if has_ended else None
        is_last = place == len(saved.segments) - 1
        yield (
            Item(label="Resumed" if place else "Began", text=_beginning(run, start, place=place)),
            Item(label="Ended", text=_ending(start, end) if end is not None else _NO_END if is_last else _KILLED),
        )


def _beginning(run: ReportedRun, start: RunRecord | None, *, place: int) -> str:
    steps = run.saved.steps.step[run.saved.segments[place] :]
    first = f"with step {steps[0]:,}" if len(steps) else "without a step"
    if start is None:
        return f"{first}; its start was not recorded"
    ranks = f"rank {start.rank} of {start.world_size}" if start.world_size > 1 else ""
    torch = f"torch {start.torch}" if start.torch else ""
    return ", ".join(filter(None, (f"{time_text(start.time)}, {first}", start.device, ranks, torch, f"halfstep {start.halfstep}")))


def _ending(start: RunRecord | None, end: RunRecord) -> str:
    lasted = duration_text(start.time, end.time) if start is not None else ""
    return ", ".join(filter(None, (time_text(end.time), f"after {lasted}" if lasted else "", end.outcome)))
