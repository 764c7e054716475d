"""Streams of step records, and what rules say about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from halfstep.monitor.rules import (
    DEFAULT_RULES,
    AbstractRule,
    LossSpike,
    MemoryGrowth,
    NonfiniteLoss,
    PersistentSkips,
    ScaleAtFloor,
    ScaleCollapse,
    ScaledNormLogged,
    ScaleOutOfRange,
    ScalerUnused,
    ScalerWithBf16,
    SkipRate,
    StepTimeRegression,
    VanishingGradients,
)
from halfstep.records import Alert, StepRecord

__all__ = ["SENSITIVE_RULES", "alerts_of", "each", "record", "scaled", "steps_of", "streams", "verdicts"]

# Every rule with thresholds so low that a short stream reaches all of its branches.
SENSITIVE_RULES: tuple[AbstractRule, ...] = (
    PersistentSkips(skips=2),
    NonfiniteLoss(skips=2, recovery=2),
    SkipRate(start_steps=3, start_skips=1, window=4, window_skips=2),
    ScaleAtFloor(floor=64.0, steps=2),
    ScaleCollapse(factor=4.0, steps=5, stable_steps=2),
    ScaleOutOfRange(low=64.0, high=1024.0, steps=2),
    ScalerUnused(steps=2),
    ScalerWithBf16(steps=2),
    ScaledNormLogged(changes=1, norms=2, least_norms=1),
    LossSpike(window=6, least=4, row=2, deviations=2.0),
    VanishingGradients(early=2, steps=2, ratio=0.1),
    StepTimeRegression(warmup=1, window=2, windows=1),
    MemoryGrowth(window=1, windows=2, mebibytes=1.0),
)


def record(step: int = 1, **changes: Any) -> StepRecord:
    """An ordinary fp16 step, changed."""
    ordinary: dict[str, Any] = {
        "skipped": False,
        "scale": 65536.0,
        "loss": 0.5,
        "grad_norm": 1.0,
        "lr": 0.1,
        "step_time_s": 0.02,
        "memory_bytes": 2**30,
        "precision": "fp16",
        "scaler": "used",
    }
    return StepRecord(step=step, **{**ordinary, **changes})


def each(name: str, values: Iterable[Any], **changes: Any) -> list[StepRecord]:
    """Ordinary steps, one for each value of a field."""
    return [record(number, **{**changes, name: value}) for number, value in enumerate(values, start=1)]


def scaled(flags: str, *, scale: float = 65536.0, start: int = 1, **changes: Any) -> list[StepRecord]:
    """What torch's scaler makes of steps that are taken (`.`), skipped (`x`), or grown before (`+`; grown and skipped: `*`)."""
    records = []
    for number, flag in enumerate(flags, start=start):
        scale *= 2 if flag in "+*" else 1
        skipped = flag in "x*"
        records.append(record(number, skipped=skipped, scale=scale, **{"grad_norm": None if skipped else 1.0, **changes}))
        scale *= 0.5 if skipped else 1
    return records


def verdicts(rule: AbstractRule, records: Iterable[StepRecord], *, ended: bool = False) -> list[Alert]:
    """The alerts of one rule about the steps of one optimizer."""
    state, alerts = rule.start(), []
    for each_record in records:
        state, alert = rule.judge(state, each_record)
        alerts.append(alert)
    if ended:
        alerts.append(rule.end(state))
    return [alert for alert in alerts if alert is not None]


def steps_of(rule: AbstractRule, records: Iterable[StepRecord]) -> list[int]:
    """The steps at which one rule raises an alert."""
    return [alert.step for alert in verdicts(rule, records)]


def alerts_of(records: Sequence[StepRecord], *, rules: Sequence[AbstractRule] = DEFAULT_RULES) -> list[Alert]:
    """The alerts of all rules about a whole run, with a state for each optimizer."""
    optimizers = dict.fromkeys(each_record.optimizer for each_record in records)
    return [
        alert
        for name in optimizers
        for rule in rules
        for alert in verdicts(rule, [each_record for each_record in records if each_record.optimizer == name], ended=True)
    ]


def streams(*, optimizers: tuple[str, ...] = ("", "G", "D"), max_size: int = 60) -> st.SearchStrategy[list[StepRecord]]:
    """Runs in which anything may be missing, absurd, or repeated for a while."""
    odd = [math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1e308, -1e308]
    one = st.builds(
        record,
        st.integers(-5, 10**9),
        skipped=st.booleans(),
        scale=st.sampled_from([1.0, 2.0**5, 2.0**10, 2.0**11, 2.0**16, 2.0**127, *odd]),
        loss=st.sampled_from([0.1, 0.5, 0.6, 50.0, *odd]),
        grad_norm=st.sampled_from([None, 1.0, 2.0, 1e-9, *odd]),
        step_time_s=st.sampled_from([0.01, 0.02, 0.05, *odd]),
        memory_bytes=st.sampled_from([None, -1, 0, 2**30, 2**31, 2**63 - 1]),
        precision=st.sampled_from(["fp16", "bf16", "fp32"]),
        scaler=st.sampled_from([None, "used", "unused", "none"]),
        optimizer=st.sampled_from(optimizers),
    )
    runs = st.lists(st.tuples(one, st.integers(1, 6)), max_size=max_size // 4)
    return runs.map(lambda pairs: [each_record for each_record, times in pairs for _ in range(times)])
