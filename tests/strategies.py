"""Hypothesis strategies for halfstep's records."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    AbstractRecord,
    Audit,
    Comparison,
    Device,
    EffectivePrecision,
    Interval,
    KeptOperation,
    KeptReason,
    LossParity,
    MemoryParts,
    MemorySource,
    ModulePrecision,
    ModuleRange,
    OperationLists,
    OperationTreatment,
    OpRecord,
    Outcome,
    OverrideEffect,
    OverrideStatus,
    Phase,
    PolicyEffect,
    Precision,
    PrecisionRun,
    ScalerStats,
    Settings,
    Site,
    StepRecord,
    TraceRecord,
    Treatment,
    UnderflowSite,
    Verdict,
)
from halfstep.records.comparison import SCHEMA

__all__ = [
    "RECORDS",
    "audits",
    "comparisons",
    "devices",
    "floats",
    "intervals",
    "kept_operations",
    "memory_parts",
    "module_precisions",
    "module_ranges",
    "op_records",
    "operation_lists",
    "operation_treatments",
    "override_effects",
    "policy_effects",
    "precision_runs",
    "precisions",
    "scaler_stats",
    "settings",
    "sites",
    "step_records",
    "texts",
    "trace_records",
    "underflow_sites",
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
        target=texts(),
    )


def sites() -> st.SearchStrategy[Site]:
    return st.builds(Site, module=texts(), file=texts(), line=st.integers())


def op_records() -> st.SearchStrategy[OpRecord]:
    return st.builds(
        OpRecord,
        op=texts(),
        phase=st.sampled_from(get_args(Phase)),
        site=sites(),
        input_dtypes=_tuples(texts()),
        output_dtypes=_tuples(texts()),
        elements=st.integers(),
        absmax=st.none() | floats(),
        nonfinite=st.integers(),
        nans=st.integers(),
        flushed=st.integers(),
        exact_absmax=st.none() | floats(),
        has_nonfinite_input=st.booleans(),
        has_nan_input=st.booleans(),
        node=texts(),
        seconds=st.none() | floats(),
    )


def module_ranges() -> st.SearchStrategy[ModuleRange]:
    return st.builds(
        ModuleRange,
        module=texts(),
        dtype=texts(),
        ops=st.integers(),
        absmax=st.none() | floats(),
        nonfinite=st.integers(),
        flushed=st.integers(),
        headroom=st.none() | floats(),
    )


def trace_records() -> st.SearchStrategy[TraceRecord]:
    return st.builds(TraceRecord, schema=st.integers(), torch=texts(), target=texts(), ops=_tuples(op_records()))


def operation_treatments() -> st.SearchStrategy[OperationTreatment]:
    treatments = st.sampled_from(get_args(Treatment))
    return st.builds(OperationTreatment, name=texts(), treatment=treatments, other=st.none() | treatments)


def operation_lists() -> st.SearchStrategy[OperationLists]:
    return st.builds(
        OperationLists,
        schema=st.integers(),
        torch=texts(),
        target=texts(),
        against=texts(),
        pattern=texts(),
        operations=_tuples(operation_treatments()),
    )


def kept_operations() -> st.SearchStrategy[KeptOperation]:
    return st.builds(
        KeptOperation,
        op=texts(),
        phase=st.sampled_from(get_args(Phase)),
        reason=st.sampled_from(get_args(KeptReason)),
        count=st.integers(),
        seconds=st.none() | floats(),
        modules=_tuples(texts()),
    )


def underflow_sites() -> st.SearchStrategy[UnderflowSite]:
    return st.builds(
        UnderflowSite,
        op=texts(),
        phase=st.sampled_from(get_args(Phase)),
        site=sites(),
        flushed=st.integers(),
        elements=st.integers(),
    )


def audits() -> st.SearchStrategy[Audit]:
    seconds = st.none() | floats()
    return st.builds(
        Audit,
        schema=st.integers(),
        torch=texts(),
        task=texts(),
        precision=texts(),
        target=texts(),
        device=texts(),
        scale=floats(),
        initial_scale=floats(),
        loss=floats(),
        operations=st.integers(),
        lowered=st.integers(),
        seconds=seconds,
        lowered_seconds=seconds,
        cast_seconds=seconds,
        casts=st.integers(),
        cast_elements=st.integers(),
        elements=st.integers(),
        kept=_tuples(kept_operations()),
        underflow=_tuples(underflow_sites()),
        ranges=_tuples(module_ranges()),
        origin=st.none() | op_records(),
        scaled_origin=st.none() | op_records(),
    )


# tests/records/test_codec.py fails when a record class is missing here.
RECORDS: dict[type[AbstractRecord], st.SearchStrategy[AbstractRecord]] = {
    Audit: audits(),
    Comparison: comparisons(),
    KeptOperation: kept_operations(),
    OperationLists: operation_lists(),
    OperationTreatment: operation_treatments(),
    UnderflowSite: underflow_sites(),
    Device: devices(),
    Interval: intervals(),
    MemoryParts: memory_parts(),
    ModulePrecision: module_precisions(),
    ModuleRange: module_ranges(),
    OpRecord: op_records(),
    OverrideEffect: override_effects(),
    PolicyEffect: policy_effects(),
    PrecisionRun: precision_runs(),
    ScalerStats: scaler_stats(),
    Settings: settings(),
    Site: sites(),
    StepRecord: step_records(),
    TraceRecord: trace_records(),
    Verdict: verdicts(),
}
