"""A run that is read back raises the alerts that it raised live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings

from halfstep.journal import read_run
from halfstep.monitor import Monitor, judge_run
from halfstep.monitor.rules import DEFAULT_RULES, AbstractRule
from halfstep.records import Alert, StepRecord
from tests.monitor.rules.streams import SENSITIVE_RULES, scaled, streams


def live(folder: Path, records: Sequence[StepRecord], *, rules: Sequence[AbstractRule]) -> tuple[Alert, ...]:
    with Monitor(folder, sinks=("jsonl",), rules=rules, command="train.py") as monitor:
        for record in records:
            monitor.observe(record)
    return monitor.alerts


@pytest.mark.parametrize("rules", [DEFAULT_RULES, SENSITIVE_RULES], ids=["default", "sensitive"])
@settings(max_examples=25)
@given(first=streams(max_size=120), second=streams())
def test_a_saved_run_raises_the_alerts_of_the_live_one(
    rules: tuple[AbstractRule, ...], first: list[StepRecord], second: list[StepRecord]
) -> None:
    with TemporaryDirectory() as name:
        alerts = (*live(Path(name), first, rules=rules), *live(Path(name), second, rules=rules))
        saved = read_run(name)
        assert judge_run(saved, rules) == alerts
        assert saved.alerts == alerts


def test_a_run_with_much_to_tell_is_the_same_when_it_is_read_back(tmp_path: Path) -> None:
    records = [
        *scaled("x" * 7 + "." * 300 + "x" * 16 + "." * 30, loss=0.5),
        *scaled("." * 40, start=400, scale=1.0, loss=50.0, grad_norm=0.0),
        *scaled("." * 30, start=440, scale=1.0, loss=float("nan"), grad_norm=float("nan"), precision="bf16"),
    ]
    alerts = live(tmp_path, records, rules=DEFAULT_RULES)
    assert {alert.rule for alert in alerts} == {
        "skip_rate",
        "persistent_skips",
        "scale_collapse",
        "scale_at_floor",
        "loss_spike",
        "vanishing_gradients",
        "nonfinite_loss",
    }
    assert judge_run(read_run(tmp_path)) == alerts
