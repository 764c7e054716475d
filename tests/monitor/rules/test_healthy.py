"""Healthy runs raise no alert at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halfstep.records import StepRecord
from tests.monitor.rules.healthy import HEALTHY, STEPS, adversarial, fp16
from tests.monitor.rules.streams import alerts_of


@pytest.mark.parametrize("run", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_raises_no_alert(run: Callable[[], list[StepRecord]]) -> None:
    records = run()
    assert len(records) == STEPS
    assert [str(alert) for alert in alerts_of(records)] == []


def test_the_simulated_runs_are_what_they_are_said_to_be() -> None:
    records = fp16(3, seed=1)
    skipped = [record.step for record in records if record.skipped]
    assert skipped[:3] == [1, 2, 3]
    assert 6 <= len(skipped) <= 14
    assert {record.scale for record in records} >= {2.0**13, 2.0**14}
    both = adversarial()
    assert {record.optimizer for record in both if record.skipped} == {"discriminator", "generator"}
