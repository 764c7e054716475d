"""What runs come to, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from halfstep.report.quantities import number_text
from halfstep.report.runs.alerts import worst_alert
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.wording import count_text, listed, share_text

__all__ = ["runs_conclusion"]

# Alerts that say that skips are no mere calibration of the loss scale.
_ABOUT_SKIPS: Final = frozenset(
    {"persistent_skips", "skip_rate", "scale_at_floor", "scale_collapse", "scale_out_of_range", "nonfinite_loss"}
)

# A sentence of an alert that is longer than this is no part of a headline.
_LONGEST: Final = 72


def runs_conclusion(runs: Sequence[ReportedRun]) -> str:
    """What runs come to, in one sentence.

    Args:
        runs: The runs, at least one.
    """
    return _single(runs[0]) if len(runs) == 1 else _several(runs)


def _single(run: ReportedRun) -> str:
    summary = run.summary
    if not summary.steps:
        return f"No step was recorded; {_alerts(run)}."
    precisions = f" in {listed(summary.precisions)}" if summary.precisions else ""
    return f"{count_text(summary.steps, 'step')}{precisions}, {_skips(run)}; {_alerts(run)}."


def _skips(run: ReportedRun) -> str:
    summary = run.summary
    if not summary.skips:
        return "none skipped"
    share = share_text(summary.skips, summary.steps)
    is_scaled = any(one.final_scale is not None for one in summary.optimizers)
    is_suspect = any(alert.rule in _ABOUT_SKIPS for alert in summary.alerts)
    why = ", which calibration explains" if is_scaled and not is_suspect else ""
    return f"{summary.skips:,} skipped ({share}{why})"


def _alerts(run: ReportedRun) -> str:
    alerts = run.summary.alerts
    worst = worst_alert(alerts)
    if worst is None:
        return "no alerts"
    first = _first_sentence(worst.message)
    said = f": {first}" if len(first) <= _LONGEST else ""
    which = "the worst: " if len(alerts) > 1 else ""
    counted = f"{count_text(len(alerts), 'alert')}, {which}" if len(alerts) > 1 else "1 alert, "
    return f"{counted}{worst.rule} at step {worst.step:,}{said}"


def _first_sentence(text: str) -> str:
    return text.split(". ", maxsplit=1)[0].rstrip(".")


def _several(runs: Sequence[ReportedRun]) -> str:
    settled = {run.name: run.summary.optimizers[0].settled_loss for run in runs if len(run.summary.optimizers) == 1}
    known = [(loss, name) for name, loss in settled.items() if loss is not None]
    lowest = ""
    if len(known) == len(runs):
        loss, name = min(known)
        lowest = f": {name} ends with the lowest loss, {number_text(loss)}"
    alerting = [run for run in runs if run.summary.alerts]
    if not alerting:
        return f"{len(runs)} runs{lowest}; no alerts."
    count = sum(len(run.summary.alerts) for run in alerting)
    worst = worst_alert([alert for run in alerting for alert in run.summary.alerts])
    owner = next(run.name for run in alerting if worst in run.summary.alerts)
    assert worst is not None, "there are alerts"
    which = "the worst: " if count > 1 else ""
    return f"{len(runs)} runs{lowest}; {count_text(count, 'alert')}, {which}{worst.rule} at step {worst.step:,} of {owner}."
