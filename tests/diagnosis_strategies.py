"""Hypothesis strategies for diagnoses and their parts."""

from __future__ import annotations

from hypothesis import strategies as st

from halfstep.records import (
    CAUSES,
    Deviation,
    Diagnosis,
    Experiment,
    NonFiniteTensor,
    Remedy,
    SourceLine,
    StuckTensor,
    VanishedGradients,
)
from tests.plain_strategies import floats, texts, tuples
from tests.trace_strategies import op_records

__all__ = [
    "deviations",
    "diagnoses",
    "experiments",
    "nonfinite_tensors",
    "remedies",
    "source_lines",
    "stuck_tensors",
    "vanished_gradients",
]


def _optional(values: st.SearchStrategy[object]) -> st.SearchStrategy[object | None]:
    """A value or none. The value comes first: where none does, some runs of Hypothesis see hardly anything else in a record so large."""
    return values | st.none()


def remedies() -> st.SearchStrategy[Remedy]:
    return st.builds(Remedy, text=texts(), override=_optional(texts()), verified=st.booleans())


def experiments() -> st.SearchStrategy[Experiment]:
    return st.builds(
        Experiment,
        question=texts(),
        precision=texts(),
        scale=_optional(floats()),
        is_clean=st.booleans(),
        answer=texts(),
        origin=_optional(op_records()),
    )


def nonfinite_tensors() -> st.SearchStrategy[NonFiniteTensor]:
    return st.builds(
        NonFiniteTensor,
        name=texts(),
        kind=st.sampled_from(["input", "parameter", "buffer"]),
        nonfinite=st.integers(),
        elements=st.integers(),
        since=_optional(st.integers()),
    )


def deviations() -> st.SearchStrategy[Deviation]:
    return st.builds(Deviation, error=floats(), input_error=floats(), loss_error=floats(), gradient_error=floats())


def vanished_gradients() -> st.SearchStrategy[VanishedGradients]:
    return st.builds(VanishedGradients, module=texts(), zeros=st.integers(), elements=st.integers())


def stuck_tensors() -> st.SearchStrategy[StuckTensor]:
    return st.builds(StuckTensor, name=texts(), dtype=texts(), stuck=st.integers(), elements=st.integers())


def source_lines() -> st.SearchStrategy[SourceLine]:
    return st.builds(SourceLine, number=st.integers(), text=texts(), is_marked=st.booleans())


def diagnoses() -> st.SearchStrategy[Diagnosis]:
    return st.builds(
        Diagnosis,
        schema=st.integers(),
        torch=texts(),
        task=texts(),
        precision=texts(),
        target=texts(),
        device=texts(),
        cause=st.sampled_from(CAUSES),
        step=st.integers(),
        steps=st.integers(),
        skips=st.integers(),
        loss=_optional(floats()),
        scale=floats(),
        passing_scale=_optional(floats()),
        origin=_optional(op_records()),
        first_nan=_optional(op_records()),
        explanation=texts(),
        remedies=tuples(remedies()),
        evidence=tuples(experiments()),
        replays=st.integers(),
        is_reproduced=st.booleans(),
        tensors=tuples(nonfinite_tensors()),
        deviation=_optional(deviations()),
        vanished=tuples(vanished_gradients()),
        stuck=tuples(stuck_tensors()),
        excerpt=tuples(source_lines()),
        interrupted=st.booleans(),
    )
