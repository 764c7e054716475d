from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.monitor.rules import MemoryGrowth
from tests.monitor.rules.streams import each, steps_of, verdicts

RULE = MemoryGrowth()
MIB = 2**20


def memory(*parts: float) -> list[int]:
    return [round(part * MIB) for part in parts]


def test_memory_that_grows_on_and_on_is_told_once() -> None:
    (alert,) = verdicts(RULE, each("memory_bytes", memory(*(1000 + 0.5 * n for n in range(2000)))))
    assert alert.step == 550
    assert "in each of the last 10 windows of 50 steps, from 1000 MiB to 1250 MiB (+25 %, 0.5 MiB a step)" in alert.message
    assert "loss.item()" in alert.advice


def test_a_slow_leak_is_told_when_it_amounts_to_something() -> None:
    (alert,) = verdicts(RULE, each("memory_bytes", memory(*(1000 + 0.05 * n for n in range(3000)))))
    assert alert.step == 2100
    assert "in each of the last 41 windows" in alert.message


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(memory(*(1000 for _ in range(2000))), id="level"),
        pytest.param(memory(*(1000 + 500 * (1 - math.exp(-n / 100)) for n in range(3000))), id="start-up"),
        pytest.param(memory(*(1000 + min(n, 450) for n in range(3000))), id="plateau"),
        pytest.param(memory(*(1000 + n % 400 for n in range(3000))), id="saw-tooth"),
        pytest.param(memory(*(1000 + 10 * (n % 37) for n in range(3000))), id="fast saw-tooth"),
        pytest.param(memory(*(100 + 0.1 * n for n in range(600))), id="less than 64 MiB"),
        pytest.param(memory(*(10000 + n for n in range(1000))), id="less than a tenth"),
        pytest.param(memory(*(1000 + 200 * (n // 200) for n in range(3000))), id="steps"),
        pytest.param([None] * 3000, id="unknown"),
        pytest.param([-1, 0] * 3000, id="absurd"),
    ],
)
def test_no_alert(values: list[Any]) -> None:
    assert steps_of(RULE, each("memory_bytes", values)) == []


def test_what_is_freed_in_between_hides_no_leak() -> None:
    assert len(steps_of(RULE, each("memory_bytes", memory(*(1000 + 0.5 * n + 300 * (n % 7) for n in range(2000)))))) == 1


def test_a_level_window_arms_it_again() -> None:
    leak = [1000 + n for n in range(600)]
    assert steps_of(RULE, each("memory_bytes", memory(*leak, *[1600] * 100, *leak))) == [550, 1250]


def test_thresholds() -> None:
    rule = MemoryGrowth(window=1, windows=2, share=0.5, mebibytes=3.0)
    assert steps_of(rule, each("memory_bytes", memory(4, 5, 6, 7, 8))) == [5]
    assert steps_of(rule, each("memory_bytes", memory(4, 5, 6, 7))) == []
    assert steps_of(rule, each("memory_bytes", memory(10, 12, 14, 15))) == []
