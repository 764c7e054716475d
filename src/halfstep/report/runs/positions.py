"""Where steps and alerts of a run stand along the axis of a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from halfstep.journal import SavedRun
from halfstep.records import Alert
from halfstep.report.runs.downsampling import Places

__all__ = ["alert_positions", "counts_anew", "step_positions"]


def step_positions(saved: SavedRun) -> Places:
    """Where each step of a run stands: at its number.

    A process that resumed the run and counts its steps from 1 again goes on where the one before it ended.

    Args:
        saved: The run.
    """
    positions: Places = saved.steps.step + np.repeat(_shifts(saved), np.diff([*saved.segments, len(saved.steps)]))
    return positions


def counts_anew(saved: SavedRun) -> bool:
    """Whether a process that resumed a run counts its steps from 1 again.

    Args:
        saved: The run.
    """
    return any(_shifts(saved))


def alert_positions(saved: SavedRun, alerts: Sequence[Alert]) -> tuple[int, ...]:
    """Where alerts of a run stand: at their steps.

    Args:
        saved: The run.
        alerts: Its own alerts, or those of a later judgement, in the order of its steps.
    """
    shifts = _shifts(saved)
    if not any(shifts):
        return tuple(alert.step for alert in alerts)
    segments = saved.alert_segments if alerts == saved.alerts else _segments(saved, alerts)
    return tuple(alert.step + shifts[segment] for alert, segment in zip(alerts, segments, strict=True))


def _shifts(saved: SavedRun) -> list[int]:
    """What is added to the numbers of the steps of each segment."""
    shifts = []
    shift = end = 0
    for first, last in _edges(saved):
        steps = saved.steps.step[first:last]
        if len(steps):
            if steps[0] <= 1:
                shift = end
            end = max(end, shift + int(steps.max()))
        shifts.append(shift)
    return shifts


def _segments(saved: SavedRun, alerts: Sequence[Alert]) -> list[int]:
    """In which segment each alert was raised: the first one that it can be, as steps only go back where another segment begins."""
    segments: list[int] = []
    segment = before = 0
    reached = [set(saved.steps.step[first:last].tolist()) for first, last in _edges(saved)]
    for alert in alerts:
        later = range(segment + (alert.step < before), len(reached))
        segment = next((each for each in later if alert.step in reached[each]), segment)
        before = alert.step
        segments.append(segment)
    return segments


def _edges(saved: SavedRun) -> Iterator[tuple[int, int]]:
    return zip(saved.segments, [*saved.segments[1:], len(saved.steps)], strict=True)
