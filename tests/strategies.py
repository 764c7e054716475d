"""Hypothesis strategies for halfstep's records."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    AbstractRecord,
    Action,
    Alert,
    Audit,
    CheckpointRecord,
    Comparison,
    Deviation,
    Device,
    Diagnosis,
    EffectivePrecision,
    EngineRecord,
    EpochSummary,
    Experiment,
    FileRecord,
    FixSafety,
    FolderRecord,
    Inspection,
    Inspections,
    Interval,
    KeptOperation,
    LossParity,
    MemoryParts,
    MemorySource,
    ModulePrecision,
    ModuleRange,
    NonFiniteTensor,
    OperationLists,
    OperationTreatment,
    OpRecord,
    OptimizerSummary,
    Outcome,
    OverrideEffect,
    OverrideStatus,
    PartRecord,
    PolicyEffect,
    Precision,
    PrecisionRun,
    Remedy,
    RuleRecord,
    RunRecord,
    RunSummaries,
    RunSummary,
    ScalerStats,
    ScalerUse,
    Settings,
    Severity,
    Site,
    SourceLine,
    StepRecord,
    StuckTensor,
    TensorRecord,
    TraceRecord,
    UnderflowSite,
    VanishedGradients,
    Verdict,
    Violation,
)
from halfstep.records.comparison import SCHEMA
from tests.checkpoint_strategies import (
    checkpoint_records,
    engine_records,
    file_records,
    folder_records,
    inspections,
    part_records,
    several_inspections,
    tensor_records,
)
from tests.diagnosis_strategies import (
    deviations,
    diagnoses,
    experiments,
    nonfinite_tensors,
    remedies,
    source_lines,
    stuck_tensors,
    vanished_gradients,
)
from tests.plain_strategies import floats, texts, tuples
from tests.run_strategies import (
    actions,
    alerts,
    epoch_summaries,
    optimizer_summaries,
    run_records,
    run_summaries,
    summaries_of_runs,
)
from tests.trace_strategies import (
    audits,
    kept_operations,
    module_ranges,
    op_records,
    operation_lists,
    operation_treatments,
    sites,
    trace_records,
    underflow_sites,
)

__all__ = [
    "RECORDS",
    "actions",
    "alerts",
    "audits",
    "checkpoint_records",
    "comparisons",
    "deviations",
    "devices",
    "diagnoses",
    "engine_records",
    "epoch_summaries",
    "experiments",
    "file_records",
    "floats",
    "folder_records",
    "inspections",
    "intervals",
    "kept_operations",
    "memory_parts",
    "module_precisions",
    "module_ranges",
    "nonfinite_tensors",
    "op_records",
    "operation_lists",
    "operation_treatments",
    "optimizer_summaries",
    "override_effects",
    "part_records",
    "policy_effects",
    "precision_runs",
    "precisions",
    "remedies",
    "rule_records",
    "run_records",
    "run_summaries",
    "scaler_stats",
    "settings",
    "several_inspections",
    "sites",
    "source_lines",
    "step_records",
    "stuck_tensors",
    "summaries_of_runs",
    "tensor_records",
    "texts",
    "trace_records",
    "underflow_sites",
    "vanished_gradients",
    "verdicts",
    "violations",
]


def precisions() -> st.SearchStrategy[str]:
    return st.sampled_from(get_args(Precision))


def step_records(*, whole_numbers: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[StepRecord]:
    """Records of steps.

    Args:
        whole_numbers: What their whole numbers are drawn from; any by default.
    """
    whole = st.integers() if whole_numbers is None else whole_numbers
    return st.builds(
        StepRecord,
        step=whole,
        skipped=st.booleans(),
        scale=floats(),
        loss=floats(),
        grad_norm=st.none() | floats(),
        lr=floats(),
        step_time_s=floats(),
        memory_bytes=st.none() | whole,
        precision=precisions(),
        epoch=st.none() | whole,
        optimizer=texts(),
        scaler=st.none() | st.sampled_from(get_args(ScalerUse)),
    )


def scaler_stats() -> st.SearchStrategy[ScalerStats]:
    return st.builds(ScalerStats, steps=st.integers(), skips=st.integers(), consecutive_skips=st.integers(), scale=floats())


def intervals() -> st.SearchStrategy[Interval]:
    return st.builds(Interval, median=floats(), low=floats(), high=floats())


def devices() -> st.SearchStrategy[Device]:
    return st.builds(Device, type=texts(), name=texts(), native=tuples(precisions()), threads=st.integers(), torch=texts(), python=texts())


def settings() -> st.SearchStrategy[Settings]:
    return st.builds(
        Settings,
        steps=st.integers(),
        warmup=st.integers(),
        seeds=tuples(st.integers()),
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
        step_times_ms=tuples(floats()),
        losses=tuples(tuples(floats())),
        skipped_at=tuples(tuples(st.integers())),
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
        overrides=tuples(override_effects()),
        modules=tuples(module_precisions()),
        casts=st.none() | st.integers(),
        cast_elements=st.none() | st.integers(),
        casts_without=st.none() | st.integers(),
    )


def violations() -> st.SearchStrategy[Violation]:
    return st.builds(
        Violation,
        code=texts(),
        rule=texts(),
        path=texts(),
        line=st.integers(),
        column=st.integers(),
        message=texts(),
        fix=st.none() | st.sampled_from(get_args(FixSafety)),
        cell=st.none() | st.integers(),
    )


def rule_records() -> st.SearchStrategy[RuleRecord]:
    return st.builds(RuleRecord, code=texts(), name=texts(), severity=st.sampled_from(get_args(Severity)), summary=texts(), page=texts())


def comparisons() -> st.SearchStrategy[Comparison]:
    return st.builds(
        Comparison,
        schema=st.just(SCHEMA),
        task=texts(),
        device=devices(),
        settings=settings(),
        runs=tuples(precision_runs()),
        verdicts=tuples(verdicts()),
        conclusion=texts(),
        interrupted=st.booleans(),
        policies=tuples(policy_effects()),
        target=texts(),
    )


# tests/records/test_codec.py fails when a record class is missing here.
RECORDS: dict[type[AbstractRecord], st.SearchStrategy[AbstractRecord]] = {
    Action: actions(),
    Alert: alerts(),
    Audit: audits(),
    CheckpointRecord: checkpoint_records(),
    Comparison: comparisons(),
    Deviation: deviations(),
    Diagnosis: diagnoses(),
    EngineRecord: engine_records(),
    Experiment: experiments(),
    FileRecord: file_records(),
    FolderRecord: folder_records(),
    Inspection: inspections(),
    Inspections: several_inspections(),
    KeptOperation: kept_operations(),
    OperationLists: operation_lists(),
    OperationTreatment: operation_treatments(),
    UnderflowSite: underflow_sites(),
    Device: devices(),
    Interval: intervals(),
    MemoryParts: memory_parts(),
    ModulePrecision: module_precisions(),
    ModuleRange: module_ranges(),
    NonFiniteTensor: nonfinite_tensors(),
    OpRecord: op_records(),
    OverrideEffect: override_effects(),
    PartRecord: part_records(),
    PolicyEffect: policy_effects(),
    PrecisionRun: precision_runs(),
    Remedy: remedies(),
    RuleRecord: rule_records(),
    EpochSummary: epoch_summaries(),
    OptimizerSummary: optimizer_summaries(),
    RunRecord: run_records(),
    RunSummaries: summaries_of_runs(),
    RunSummary: run_summaries(),
    ScalerStats: scaler_stats(),
    Settings: settings(),
    Site: sites(),
    SourceLine: source_lines(),
    StepRecord: step_records(),
    StuckTensor: stuck_tensors(),
    TensorRecord: tensor_records(),
    TraceRecord: trace_records(),
    VanishedGradients: vanished_gradients(),
    Verdict: verdicts(),
    Violation: violations(),
}
