from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halfstep.records import Alert, RunSummaries, RunSummary


def summary(*severities: Any) -> RunSummary:
    alerts = tuple(Alert(rule="r", step=1, message="m", advice="a", site=None, severity=severity) for severity in severities)
    return RunSummary(
        name="digits",
        folder="runs/digits",
        starts=(),
        ends=(),
        precisions=("bf16",),
        steps=1,
        skips=0,
        nonfinite_losses=0,
        median_step_time_ms=None,
        peak_memory_mib=None,
        optimizers=(),
        epochs=(),
        alerts=alerts,
        recorded_alerts=None,
        actions=(),
        notes=(),
    )


@pytest.mark.parametrize(("severities", "findings"), [((), False), (("info",), False), (("info", "warning"), True), (("error",), True)])
def test_warnings_and_errors_are_findings(severities: tuple[str, ...], findings: bool) -> None:
    one = summary(*severities)
    assert one.has_findings is findings
    assert RunSummaries(runs=(summary(), one)).has_findings is findings


def test_what_was_recorded_is_no_finding_where_it_was_judged_anew() -> None:
    assert not replace(summary(), recorded_alerts=summary("error").alerts).has_findings
