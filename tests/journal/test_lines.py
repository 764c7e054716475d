"""The lines of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.journal import Entry, encode_line
from halfstep.journal.lines import _FORMS, _MANY, KINDS
from halfstep.records import StepRecord
from tests.strategies import actions, alerts, run_records, step_records

STEP = StepRecord(
    step=7, skipped=True, scale=65536.0, loss=0.5, grad_norm=None, lr=0.01, step_time_s=0.25, memory_bytes=1024, precision="fp16"
)


@given(entry=run_records() | step_records() | alerts() | actions())
def test_a_line_is_the_json_of_the_record_after_its_kind(entry: Entry) -> None:
    kind = next(kind for kind, cls in KINDS.items() if cls is type(entry))
    for _ in range(2):  # The second time, what was learned from the first is used.
        line = encode_line(entry)
        assert line == f'{{"kind": "{kind}", {entry.to_json()[1:]}\n'
        assert line.isascii()
        assert line.count("\n") == 1


@given(first=step_records(), second=step_records())
def test_what_is_kept_of_one_record_is_not_written_for_another(first: StepRecord, second: StepRecord) -> None:
    mixed = replace(first, loss=second.loss, grad_norm=second.grad_norm, step=second.step, memory_bytes=second.memory_bytes)
    for record in (first, mixed, second, replace(mixed, skipped=not first.skipped)):
        assert encode_line(record) == f'{{"kind": "step", {record.to_json()[1:]}\n'


@pytest.mark.parametrize("name", ["nan", "inf", "fine-tuning 100%", "%s", "%(loss)s", "%%", '"', "\n", "n" * 50])
def test_a_name_is_only_a_name(name: str) -> None:
    for loss in (0.5, float("nan"), float("-inf")):
        record = replace(STEP, optimizer=name, loss=loss)
        for _ in range(2):
            assert json.loads(encode_line(record)) == {"kind": "step", **json.loads(record.to_json())}


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    numpy: Any = {"step": np.int64(7), "loss": np.float32(0.5), "scale": np.float64(65536.0), "skipped": np.bool_(True)}
    assert encode_line(replace(STEP, **numpy)) == encode_line(STEP)
    assert encode_line(replace(STEP, **numpy)) == encode_line(STEP)


def test_a_fraction_is_not_written_into_a_whole_number() -> None:
    wrong: Any = 1.5
    with pytest.raises(TypeError, match="integer"):
        encode_line(replace(STEP, step=wrong))


def test_what_is_kept_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.journal.lines._FORMS", kept := dict[Any, Any]())
    for number in range(_MANY + 10):
        encode_line(replace(STEP, optimizer=str(number)))
    assert len(kept) == _MANY
    assert json.loads(encode_line(replace(STEP, optimizer="another")))["optimizer"] == "another"
    assert len(_FORMS) <= _MANY


@given(numbers=st.lists(st.floats(allow_nan=False), min_size=4, max_size=4))
def test_floats_are_written_to_the_last_bit(numbers: list[float]) -> None:
    names = ("scale", "loss", "lr", "step_time_s")
    record = replace(STEP, **dict(zip(names, numbers, strict=True)))  # type: ignore[arg-type]
    plain = json.loads(encode_line(record))
    assert [repr(float(plain[name].replace("Infinity", "inf")) if isinstance(plain[name], str) else plain[name]) for name in names] == [
        repr(number) for number in numbers
    ]
