"""Hypothesis strategies for the records of traces and audits."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    Audit,
    KeptOperation,
    KeptReason,
    ModuleRange,
    OperationLists,
    OperationTreatment,
    OpRecord,
    Phase,
    Site,
    TraceRecord,
    Treatment,
    UnderflowSite,
)
from tests.plain_strategies import floats, texts, tuples

__all__ = [
    "audits",
    "kept_operations",
    "module_ranges",
    "op_records",
    "operation_lists",
    "operation_treatments",
    "sites",
    "trace_records",
    "underflow_sites",
]


def sites() -> st.SearchStrategy[Site]:
    return st.builds(Site, module=texts(), file=texts(), line=st.integers())


def op_records() -> st.SearchStrategy[OpRecord]:
    return st.builds(
        OpRecord,
        op=texts(),
        phase=st.sampled_from(get_args(Phase)),
        site=sites(),
        input_dtypes=tuples(texts()),
        output_dtypes=tuples(texts()),
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
    return st.builds(TraceRecord, schema=st.integers(), torch=texts(), target=texts(), ops=tuples(op_records()))


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
        operations=tuples(operation_treatments()),
    )


def kept_operations() -> st.SearchStrategy[KeptOperation]:
    return st.builds(
        KeptOperation,
        op=texts(),
        phase=st.sampled_from(get_args(Phase)),
        reason=st.sampled_from(get_args(KeptReason)),
        count=st.integers(),
        seconds=st.none() | floats(),
        modules=tuples(texts()),
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
        kept=tuples(kept_operations()),
        underflow=tuples(underflow_sites()),
        ranges=tuples(module_ranges()),
        origin=st.none() | op_records(),
        scaled_origin=st.none() | op_records(),
    )
