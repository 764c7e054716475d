"""Hypothesis strategies for halfstep's records."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    AbstractRecord,
    Comparison,
    Device,
    EffectivePrecision,
    Interval,
    LossParity,
    MemoryParts,
    MemorySource,
    ModulePrecision,
    Outcome,
    OverrideEffect,
    OverrideStatus,
    PolicyEffect,
    Precision,
    PrecisionRun,
    ScalerStats,
    Settings,
    StepRecord,
    Verdict,
)
from halfstep.records.comparison import SCHEMA

__all__ = [
    "RECORDS",
    "comparisons",
    "devices",
    "floats",
    "intervals",
    "memory_parts",
    "module_precisions",
    "override_effects",
    "policy_effects",
    "precision_runs",
    "precisions",
    "scaler_stats",
    "settings",
    "step_records",
    "texts",
    "verdicts",
]

_AWKWARD_TEXTS = ("</script>", "<!--", "a & b", '"quoted"', "back\\slash", "NaN", "\u2028\u2029", "\x00\x1f", "\U0001f600", "null", "")


def floats() -> st.SearchStrategy[float]:
    """Any float: NaN, both infinities, subnormal numbers and -0.0 included."""
    return st.floats() | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324])


def texts() -> st.SearchStrategy[str]:
    """Any text that UTF-8 can hold, with what breaks out of HTML, JSON or a line well represented."""
    return st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(_AWKWARD_TEXTS)


def precisions() -> st.SearchStrategy[str]:
    return st.sampled_from(get_args(Precision))


def _tuples(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=4).map(tuple)


def step_records() -> st.SearchStrategy[StepRecord]:
    return st.builds(
        StepRecord,
        step=st.integers(),
        skipped=st.booleans(),
        scale=floats(),
        loss=floats(),
        grad_norm=st.none() | floats(),
        lr=floats(),
        step_time_s=floats(),
        memory_bytes=st.none() | st.integers(),
        precision=precisions(),
    )


def scaler_stats() -> st.SearchStrategy[ScalerStats]:
    return st.builds(ScalerStats, steps=st.integers(), skips=st.integers(), consecutive_skips=st.integers(), scale=floats())


def intervals() -> st.SearchStrategy[Interval]:
    return st.builds(Interval, median=floats(), low=floats(), high=floats())


def devices() -> st.SearchStrategy[Device]:
    return st.builds(Device, type=texts(), name=texts(), native=_tuples(precisions()), threads=st.integers(), torch=texts(), python=texts())


def settings() -> st.SearchStrategy[Settings]:
    return st.builds(
        Settings,
        steps=st.integers(),
        warmup=st.integers(),
        seeds=_tuples(st.integers()),
        batch_size=st.none() | st.integers(),
        channels_last=st.booleans(),
        compile=st.booleans(),
        loss_scale=texts(),
    )


def memory_parts() -> st.SearchStrategy[MemoryParts]:
    return st.builds(MemoryParts, parameters=floats(), optimizer=floats(), batch=floats(), step=floats())


def precision_runs() -> st.SearchStrategy[PrecisionRun]:
    return st.builds(
        PrecisionRun,
        precision=precisions(),
        step_time_ms=st.none() | intervals(),
        samples_per_s=st.none() | floats(),
        peak_memory_mib=st.none() | floats(),
        memory_source=st.sampled_from(get_args(MemorySource)),
        first_loss=st.none() | floats(),
        final_loss=st.none() | floats(),
        skipped_steps=st.integers(),
        final_scale=st.none() | floats(),
        steps=st.integers(),
        memory=st.none() | memory_parts(),
        step_times_ms=_tuples(floats()),
        losses=_tuples(_tuples(floats())),
        skipped_at=_tuples(_tuples(st.integers())),
        note=texts(),
        outcome=st.sampled_from(get_args(Outcome)),
    )


def verdicts() -> st.SearchStrategy[Verdict]:
    return st.builds(
        Verdict,
        precision=precisions(),
        baseline=precisions(),
        speedup=st.none() | intervals(),
        memory_ratio=st.none() | floats(),
        loss_parity=st.sampled_from(get_args(LossParity)),
        reason=texts(),
    )


def module_precisions() -> st.SearchStrategy[ModulePrecision]:
    return st.builds(
        ModulePrecision,
        path=texts(),
        kind=texts(),
        precision=st.sampled_from(get_args(EffectivePrecision)),
        reason=texts(),
        direct=st.booleans(),
        parameters=st.integers(),
        calls=st.none() | st.integers(),
    )


def override_effects() -> st.SearchStrategy[OverrideEffect]:
    return st.builds(
        OverrideEffect,
        override=texts(),
        modules=st.integers(),
        parameters=st.integers(),
        ran=st.none() | st.integers(),
        casts=st.none() | st.integers(),
        status=st.sampled_from(get_args(OverrideStatus)),
        note=texts(),
    )


def policy_effects() -> st.SearchStrategy[PolicyEffect]:
    return st.builds(
        PolicyEffect,
        schema=st.just(SCHEMA),
        name=texts(),
        policy=texts(),
        default=precisions(),
        pure=st.booleans(),
        task=texts(),
        overrides=_tuples(override_effects()),
        modules=_tuples(module_precisions()),
        casts=st.none() | st.integers(),
        cast_elements=st.none() | st.integers(),
        casts_without=st.none() | st.integers(),
    )


def comparisons() -> st.SearchStrategy[Comparison]:
    return st.builds(
        Comparison,
        schema=st.just(SCHEMA),
        task=texts(),
        device=devices(),
        settings=settings(),
        runs=_tuples(precision_runs()),
        verdicts=_tuples(verdicts()),
        conclusion=texts(),
        interrupted=st.booleans(),
        policies=_tuples(policy_effects()),
    )


# tests/records/test_codec.py fails when a record class is missing here.
RECORDS: dict[type[AbstractRecord], st.SearchStrategy[AbstractRecord]] = {
    Comparison: comparisons(),
    Device: devices(),
    Interval: intervals(),
    MemoryParts: memory_parts(),
    ModulePrecision: module_precisions(),
    OverrideEffect: override_effects(),
    PolicyEffect: policy_effects(),
    PrecisionRun: precision_runs(),
    ScalerStats: scaler_stats(),
    Settings: settings(),
    StepRecord: step_records(),
    Verdict: verdicts(),
}
