from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.journal import Entry
from halfstep.report.runs import reported_runs
from halfstep.report.runs.conclusions import runs_conclusion
from tests.report import run_samples as samples


def conclusion(*entries: Entry) -> str:
    return runs_conclusion([samples.reported(*entries)])


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (samples.steps(1200), "1,200 steps in fp16, none skipped; no alerts."),
        ([samples.step(1, precision="bf16", scale=1.0)], "1 step in bf16, none skipped; no alerts."),
        ([*samples.steps(9), samples.step(10, precision="bf16")], "10 steps in fp16 and bf16, none skipped; no alerts."),
        ([samples.start()], "No step was recorded; no alerts."),
        (
            [*samples.steps(9), samples.step(10, skipped=True)],
            "10 steps in fp16, 1 skipped (10 %, which calibration explains); no alerts.",
        ),
        # Without a loss scale there is nothing to calibrate.
        ([*samples.steps(9, scale=1.0), samples.step(10, scale=1.0, skipped=True)], "10 steps in fp16, 1 skipped (10 %); no alerts."),
        (
            [samples.step(1, skipped=True), samples.alert("persistent_skips", 1, message="10 steps in a row were skipped. Bad.")],
            "1 step in fp16, 1 skipped (100 %); 1 alert, persistent_skips at step 1: 10 steps in a row were skipped.",
        ),
        (
            [*samples.steps(2000), samples.alert(at=7), samples.alert("nonfinite_loss", 1234, severity="error", message="x" * 80)],
            "2,000 steps in fp16, none skipped; 2 alerts, the worst: nonfinite_loss at step 1,234.",
        ),
    ],
)
def test_a_run_in_one_sentence(entries: list[Entry], expected: str) -> None:
    assert conclusion(*entries) == expected


@pytest.mark.parametrize("rule", ["persistent_skips", "skip_rate", "scale_at_floor", "scale_collapse", "nonfinite_loss"])
def test_calibration_does_not_explain_skips_that_were_alerted(rule: str) -> None:
    assert "calibration" not in conclusion(samples.step(1, skipped=True), samples.alert(rule))
    assert "calibration" in conclusion(samples.step(1, skipped=True), samples.alert("memory_growth"))


def several(*losses: float, alerts: tuple[Any, ...] = ()) -> str:
    saved = [samples.saved([samples.step(1, loss=loss), *alerts * (place == 1)], name="xyz"[place]) for place, loss in enumerate(losses)]
    return runs_conclusion(reported_runs(saved))


def test_several_runs_in_one_sentence() -> None:
    assert several(0.5, 0.25, 0.75) == "3 runs: y ends with the lowest loss, 0.2500; no alerts."
    assert several(0.5, 0.25, alerts=(samples.alert(),)) == (
        "2 runs: y ends with the lowest loss, 0.2500; 1 alert, loss_spike at step 2 of y."
    )
    alerts = (samples.alert(), samples.alert("nonfinite_loss", 9, severity="error"))
    assert several(0.5, 0.75, alerts=alerts).endswith("; 2 alerts, the worst: nonfinite_loss at step 9 of y.")


def test_losses_that_cannot_be_compared_are_not() -> None:
    assert several(0.5, math.nan) == "2 runs; no alerts."
    gan = samples.saved([samples.step(1, optimizer="a"), samples.step(2, optimizer="b")], name="gan")
    assert runs_conclusion(reported_runs([gan, samples.saved([samples.step(1)], name="x")])) == "2 runs; no alerts."
