"""Saved runs as they stand in a report: each with a name of its own, and with what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from halfstep.journal import SavedRun
from halfstep.records import Alert, RunSummaries, RunSummary
from halfstep.report.runs.summaries import run_summary

__all__ = ["ReportedRun", "reported_record", "reported_runs"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportedRun:
    """A saved run in a report.

    Attributes:
        saved: The run.
        summary: What it comes to; its name is that of the run in the report.
        role: By which it has its colour.
    """

    saved: SavedRun
    summary: RunSummary
    role: str

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.summary.name


def reported_runs(runs: Sequence[SavedRun], *, judge: Callable[[SavedRun], tuple[Alert, ...]] | None = None) -> tuple[ReportedRun, ...]:
    """Saved runs, ready for a report.

    Args:
        runs: The runs.
        judge: Gives the alerts of a run; `None` takes those that were recorded.

    Returns:
        The runs in their order. A run whose folder is called as that of another one is named by its path.
    """
    reported = []
    for name, saved in zip(_names(runs), runs, strict=True):
        summary = run_summary(saved, name=name, judged=None if judge is None else judge(saved))
        # A single run has the colour of its precision, as in all reports.
        role = name if len(runs) > 1 else summary.precisions[0] if len(summary.precisions) == 1 else ""
        reported.append(ReportedRun(saved=saved, summary=summary, role=role))
    return tuple(reported)


def reported_record(runs: Sequence[ReportedRun]) -> RunSummary | RunSummaries:
    """What is written as JSON: the summary of a single run, or those of several.

    Args:
        runs: The runs, at least one.
    """
    return runs[0].summary if len(runs) == 1 else RunSummaries(runs=tuple(run.summary for run in runs))


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """A name for each run: that of its folder, its path where names are equal, and a number where paths are equal as well."""
    how_often = Counter(run.name for run in runs)
    names = [run.name if how_often[run.name] == 1 else str(run.folder) for run in runs]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique
