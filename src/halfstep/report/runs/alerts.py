"""The alerts of runs as cards: the worst first, equal ones folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from halfstep.records import Alert, Severity
from halfstep.report.document import Card, Item
from halfstep.report.runs.marks import SEVERITY_TONES
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.wording import steps_text

__all__ = ["alert_cards", "difference_items", "worst_alert"]

_ORDER: Final[dict[Severity, int]] = {"error": 0, "warning": 1, "info": 2}


def alert_cards(runs: Sequence[ReportedRun]) -> tuple[Card, ...]:
    """A card for each thing that was alerted, the worst first. Alerts of one rule at one place in the code share a card.

    Args:
        runs: The runs.
    """
    folded: dict[tuple[str, str, str, Severity], list[tuple[ReportedRun, Alert]]] = {}
    for run in runs:
        for alert in run.summary.alerts:
            folded.setdefault((run.name, alert.rule, alert.place, alert.severity), []).append((run, alert))
    ordered = sorted(folded.values(), key=lambda group: (_ORDER[group[0][1].severity], group[0][1].step))
    return tuple(_card([alert for _, alert in group], run=group[0][0], has_name=len(runs) > 1) for group in ordered)


def worst_alert(alerts: Sequence[Alert]) -> Alert | None:
    """The first of the most severe alerts; `None` where there are none.

    Args:
        alerts: The alerts.
    """
    return min(alerts, key=lambda alert: (_ORDER[alert.severity], alert.step), default=None)


def difference_items(run: ReportedRun) -> tuple[Item, ...]:
    """Where a later judgement differs from what the run itself alerted; nothing where there was none, or they agree.

    Args:
        run: The run.
    """
    if run.summary.recorded_alerts is None:
        return ()
    now = Counter((alert.rule, alert.step) for alert in run.summary.alerts)
    then = Counter((alert.rule, alert.step) for alert in run.summary.recorded_alerts)
    return tuple(
        Item(label=label, text="; ".join(f"{rule} at {steps_text(steps)}" for rule, steps in _by_rule(alerts).items()))
        for label, alerts in (("Only now", now - then), ("Only when it ran", then - now))
        if alerts
    )


def _by_rule(alerts: Counter[tuple[str, int]]) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    for rule, step in sorted(alerts.elements()):
        steps.setdefault(rule, []).append(step)
    return steps


def _card(alerts: Sequence[Alert], *, run: ReportedRun, has_name: bool) -> Card:
    first = alerts[0]
    times = f"{len(alerts)} times" if len(alerts) > 1 else ""
    messages = {alert.message for alert in alerts}
    return Card(
        title=first.rule,
        badge=first.severity,
        tone=SEVERITY_TONES[first.severity],
        place=" · ".join(filter(None, (run.name if has_name else "", steps_text([alert.step for alert in alerts]), times, first.place))),
        text=f"The first: {first.message}" if len(messages) > 1 else first.message,
        advice=first.advice,
        role=run.role if has_name else "",
    )
