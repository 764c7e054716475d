"""The steps of a run, field by field."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.journal import columns as module
from halfstep.journal.columns import ColumnBuilder, StepColumns
from halfstep.records import StepRecord
from tests.records.test_codec import same
from tests.strategies import step_records

STEP = StepRecord(
    step=7, skipped=True, scale=65536.0, loss=0.5, grad_norm=None, lr=0.01, step_time_s=0.25, memory_bytes=1024, precision="fp16"
)
INT64 = st.integers(-(2**63), 2**63 - 1)


def built(*records: StepRecord) -> StepColumns:
    builder = ColumnBuilder()
    for line, record in enumerate(records, 1):
        builder.add(line, json.loads(record.to_json()))
    assert builder.faults == []
    return builder.columns()


@given(records=st.lists(step_records(whole_numbers=INT64), max_size=12), chunk=st.integers(1, 5))
def test_records_survive_columns(records: list[StepRecord], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        columns = built(*records)
        read = [*columns.records()]
    assert len(columns) == len(read) == len(records)
    assert all(same(*pair) for pair in zip(read, records, strict=True))


def test_there_is_an_array_for_each_field() -> None:
    columns = built(STEP, replace(STEP, step=8, epoch=3, memory_bytes=None, grad_norm=2.0, scaler="used", optimizer="a"))
    kinds = {int: np.int64, float: np.float64, bool: np.bool_}
    for field in fields(StepRecord):
        array = getattr(columns, field.name)
        hint = get_type_hints(StepRecord)[field.name]
        wanted = next((dtype for kind, dtype in kinds.items() if hint in (kind, kind | None)), np.int32)
        assert array.dtype == wanted, field.name
        assert len(array) == 2
    assert columns.step.tolist() == [7, 8]
    assert columns.skipped.tolist() == [True, True]
    assert np.isnan(columns.grad_norm).tolist() == [True, False]
    assert columns.memory_bytes.tolist() == [1024, -1]
    assert columns.epoch.tolist() == [-1, 3]
    assert columns.scaler.tolist() == [-1, 0]
    assert columns.names == {"precision": ("fp16",), "optimizer": ("", "a"), "scaler": ("used",)}


def test_a_nan_that_was_recorded_is_told_from_one_that_stands_for_nothing() -> None:
    columns = built(replace(STEP, grad_norm=float("nan"), epoch=-1), STEP)
    assert np.isnan(columns.grad_norm).all()
    assert columns.known["grad_norm"].tolist() == [True, False]
    assert columns.known["epoch"].tolist() == [True, False]
    assert [record.grad_norm for record in columns.records()] == [pytest.approx(float("nan"), nan_ok=True), None]
    assert [record.epoch for record in columns.records()] == [-1, None]


def test_without_a_step_there_are_empty_arrays() -> None:
    columns = built()
    assert len(columns) == len(columns.loss) == 0
    assert columns.loss.dtype == np.float64
    assert [*columns.records()] == []


@pytest.mark.parametrize(
    ("first", "last", "steps"), [(0, None, [0, 1, 2, 3]), (1, 3, [1, 2]), (-1, None, [3]), (2, 99, [2, 3]), (3, 1, []), (0, -1, [0, 1, 2])]
)
def test_a_part_of_the_records(first: int, last: int | None, steps: list[int]) -> None:
    columns = built(*(replace(STEP, step=step) for step in range(4)))
    assert [record.step for record in columns.records(first, last)] == steps


@pytest.mark.parametrize("name", ["los", "__array__", "_arrays", "__deepcopy__"])
def test_what_is_no_field_is_no_attribute(name: str) -> None:
    columns: Any = built(STEP)
    with pytest.raises(AttributeError, match=f"'StepColumns' object has no attribute '{name}'"):
        getattr(columns, name)


def test_columns_are_frozen() -> None:
    columns: Any = built(STEP)
    with pytest.raises(FrozenInstanceError, match="arrays"):
        columns.arrays = {}
    with pytest.raises((AttributeError, TypeError)):
        columns.loss = 1


def test_columns_are_copied_and_pickled() -> None:
    columns = built(STEP)
    for twin in (copy.copy(columns), copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))):
        assert [*twin.records()] == [STEP]


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("step", 1.0, "a whole number was expected, not 1.0"),
        ("step", True, "a whole number was expected, not True"),
        ("step", None, "a whole number was expected, not None"),
        ("step", 2**63, "A whole number in it is too large"),
        ("memory_bytes", -(2**63) - 1, "A whole number in it is too large"),
        ("loss", "nan", "a number was expected, not 'nan'"),
        ("loss", None, "a number was expected, not None"),
        ("loss", 10**400, "too large"),
        ("skipped", 0, "true or false was expected, not 0"),
        ("precision", "fp8", "'fp32' or 'bf16' or 'fp16' was expected, not 'fp8'"),
        ("precision", None, "was expected, not None"),
        ("precision", [], "was expected, not []"),
        ("optimizer", 3, "text was expected, not 3"),
        ("scaler", "off", "was expected, not 'off'"),
        ("grad_norm", {}, "@ $.grad_norm"),
    ],
)
def test_a_wrong_value_costs_its_own_line_alone(name: str, wrong: object, why: str) -> None:
    builder = ColumnBuilder()
    plain = json.loads(STEP.to_json())
    for line, value in ((1, plain), (2, {**plain, name: wrong}), (3, {**plain, "step": 9})):
        builder.add(line, value)
    assert [*builder.columns().records()] == [STEP, replace(STEP, step=9)]
    [(line, told)] = builder.faults
    assert line == 2
    assert why in told


@pytest.mark.parametrize("name", [field.name for field in fields(StepRecord)])
def test_a_missing_field_has_its_default_or_costs_the_line(name: str) -> None:
    plain = json.loads(replace(STEP, epoch=3, optimizer="a", scaler="used").to_json())
    del plain[name]
    builder = ColumnBuilder()
    builder.add(5, plain)
    if name in {"epoch", "optimizer", "scaler"}:
        default = StepRecord.__dataclass_fields__[name].default
        assert [getattr(record, name) for record in builder.columns().records()] == [default]
        assert builder.faults == []
    else:
        assert len(builder) == 0
        assert builder.faults[0][0] == 5
        assert f"required field missing @ $.{name}" in builder.faults[0][1]
