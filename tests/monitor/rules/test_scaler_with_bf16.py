from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.monitor.rules import ScalerWithBf16
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = ScalerWithBf16()


@pytest.mark.parametrize("changes", [{"scaler": "used"}, {"scaler": "used", "scale": 1.0}, {"scaler": None}], ids=str)
def test_three_steps_are_told_once(changes: dict[str, Any]) -> None:
    (alert,) = verdicts(RULE, each("precision", ["bf16"] * 30, **changes))
    assert alert.step == 3
    assert f"3 steps in a row ran in bf16 with a loss scaler (scale {changes.get('scale', 65536.0):.0f})." in alert.message
    assert "enabled=dtype == torch.float16" in alert.advice


def test_skips_are_told() -> None:
    (alert,) = verdicts(RULE, [record(n, precision="bf16", skipped=n == 1) for n in range(3)])
    assert "1 step of them was skipped." in alert.message
    (alert,) = verdicts(RULE, [record(n, precision="bf16", skipped=n > 0) for n in range(3)])
    assert "2 steps of them were skipped." in alert.message


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"scaler": "none"},
        {"scaler": "unused"},
        {"scaler": None, "scale": 1.0},
        {"scaler": None, "scale": math.nan},
        {"scaler": None, "scale": math.inf},
    ],
    ids=str,
)
def test_no_alert(changes: dict[str, Any]) -> None:
    assert steps_of(RULE, [record(n, **{"precision": "bf16", **changes}) for n in range(30)]) == []


def test_two_steps_are_too_few_and_another_arms_it_again() -> None:
    assert steps_of(RULE, each("precision", ["bf16", "bf16", "fp32"] * 10)) == []
    assert steps_of(RULE, each("precision", ["bf16"] * 5 + ["fp32"] + ["bf16"] * 5)) == [3, 9]


def test_a_run_that_was_in_fp16_before_keeps_its_scaler() -> None:
    assert steps_of(RULE, each("precision", ["fp16"] * 5 + ["bf16"] * 50)) == []


def test_thresholds() -> None:
    assert steps_of(ScalerWithBf16(steps=1), [record(4, precision="bf16")]) == [4]
