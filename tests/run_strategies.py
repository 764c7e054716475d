"""Hypothesis strategies for what a run leaves behind, and for what it comes to."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    RUN_SCHEMA,
    SUMMARY_SCHEMA,
    Action,
    Alert,
    EpochSummary,
    OptimizerSummary,
    Precision,
    RunEvent,
    RunRecord,
    RunSummaries,
    RunSummary,
    Severity,
)
from tests.plain_strategies import floats, texts, tuples
from tests.trace_strategies import sites

__all__ = [
    "actions",
    "alerts",
    "epoch_summaries",
    "optimizer_summaries",
    "run_records",
    "run_summaries",
    "summaries_of_runs",
]


def run_records() -> st.SearchStrategy[RunRecord]:
    return st.builds(
        RunRecord,
        schema=st.just(RUN_SCHEMA),
        event=st.sampled_from(get_args(RunEvent)),
        time=texts(),
        command=texts(),
        halfstep=texts(),
        torch=st.none() | texts(),
        device=texts(),
        rank=st.integers(),
        world_size=st.integers(),
        outcome=texts(),
    )


def alerts() -> st.SearchStrategy[Alert]:
    return st.builds(
        Alert,
        rule=texts(),
        step=st.integers(),
        message=texts(),
        advice=texts(),
        site=st.none() | sites(),
        severity=st.sampled_from(get_args(Severity)),
    )


def actions() -> st.SearchStrategy[Action]:
    return st.builds(Action, rule=texts(), step=st.integers(), action=texts(), message=texts())


def epoch_summaries() -> st.SearchStrategy[EpochSummary]:
    return st.builds(
        EpochSummary,
        epoch=st.none() | st.integers(),
        first_step=st.integers(),
        last_step=st.integers(),
        steps=st.integers(),
        skips=st.integers(),
        loss=st.none() | floats(),
        scale=floats(),
        step_time_ms=st.none() | floats(),
    )


def optimizer_summaries() -> st.SearchStrategy[OptimizerSummary]:
    return st.builds(
        OptimizerSummary,
        optimizer=texts(),
        steps=st.integers(),
        skips=st.integers(),
        first_loss=st.none() | floats(),
        last_loss=st.none() | floats(),
        best_loss=st.none() | floats(),
        best_step=st.none() | st.integers(),
        settled_loss=st.none() | floats(),
        final_scale=st.none() | floats(),
        final_lr=st.none() | floats(),
    )


def run_summaries() -> st.SearchStrategy[RunSummary]:
    return st.builds(
        RunSummary,
        schema=st.just(SUMMARY_SCHEMA),
        name=texts(),
        folder=texts(),
        starts=tuples(run_records()),
        ends=tuples(run_records()),
        precisions=tuples(st.sampled_from(get_args(Precision))),
        steps=st.integers(),
        skips=st.integers(),
        nonfinite_losses=st.integers(),
        median_step_time_ms=st.none() | floats(),
        peak_memory_mib=st.none() | floats(),
        optimizers=tuples(optimizer_summaries()),
        epochs=tuples(epoch_summaries()),
        alerts=tuples(alerts()),
        # The value comes first: where none does, some runs of Hypothesis see hardly anything else in a record so large.
        recorded_alerts=tuples(alerts()) | st.none(),
        actions=tuples(actions()),
        notes=tuples(texts()),
    )


def summaries_of_runs() -> st.SearchStrategy[RunSummaries]:
    return st.builds(RunSummaries, schema=st.just(SUMMARY_SCHEMA), runs=tuples(run_summaries()))
