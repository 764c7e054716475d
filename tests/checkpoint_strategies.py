"""Hypothesis strategies for what checkpoints say about themselves."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from halfstep.records import (
    CHECKPOINT_SCHEMA,
    CheckpointKind,
    CheckpointRecord,
    EngineRecord,
    FileRecord,
    FolderRecord,
    Inspection,
    Inspections,
    PartRecord,
    Precision,
    TensorRecord,
)
from tests.plain_strategies import floats, texts, tuples

__all__ = [
    "checkpoint_records",
    "engine_records",
    "file_records",
    "folder_records",
    "inspections",
    "part_records",
    "several_inspections",
    "tensor_records",
]


def tensor_records() -> st.SearchStrategy[TensorRecord]:
    return st.builds(TensorRecord, name=texts(), dtype=texts(), shape=tuples(st.integers()), storage=texts())


def part_records() -> st.SearchStrategy[PartRecord]:
    return st.builds(PartRecord, name=texts(), tensors=st.integers(), bytes=st.integers())


def engine_records() -> st.SearchStrategy[EngineRecord]:
    return st.builds(
        EngineRecord,
        name=texts(),
        precision=st.sampled_from(get_args(Precision)),
        policy=texts(),
        steps=st.integers(),
        skips=st.none() | st.integers(),
        scale=st.none() | floats(),
        micro_batches=st.integers(),
        accumulate=st.integers(),
    )


def checkpoint_records() -> st.SearchStrategy[CheckpointRecord]:
    return st.builds(
        CheckpointRecord,
        schema=st.just(CHECKPOINT_SCHEMA),
        step=st.integers(),
        time=texts(),
        halfstep=texts(),
        torch=texts(),
        python=texts(),
        device=texts(),
        ranks=st.integers(),
        rank=st.integers(),
        engines=tuples(engine_records()),
        parts=tuples(part_records()),
        tensors=tuples(tensor_records()),
    )


def file_records() -> st.SearchStrategy[FileRecord]:
    return st.builds(FileRecord, file=texts(), offset=st.integers(), length=st.integers(), crc32=st.integers(), name=texts())


def folder_records() -> st.SearchStrategy[FolderRecord]:
    return st.builds(FolderRecord, schema=st.just(CHECKPOINT_SCHEMA), checkpoint=checkpoint_records(), files=tuples(file_records()))


def inspections() -> st.SearchStrategy[Inspection]:
    return st.builds(
        Inspection,
        path=texts(),
        kind=st.sampled_from(get_args(CheckpointKind)),
        bytes=st.integers(),
        fault=texts(),
        checkpoint=st.none() | checkpoint_records(),
    )


def several_inspections() -> st.SearchStrategy[Inspections]:
    return st.builds(Inspections, inspections=tuples(inspections()))
