"""Steps as a table."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError
from halfstep.monitor import CsvSink
from halfstep.records import Action, StepRecord
from tests.monitor.toy_rules import step
from tests.strategies import step_records

HEADER = ",".join(field.name for field in fields(StepRecord))


def test_rows_follow_the_header_and_a_resumed_run_adds_to_them(tmp_path: Path) -> None:
    for number in (1, 2):
        sink = CsvSink(tmp_path)
        sink.write([step(number, skipped=number == 2), Action(rule="r", step=1, action="a", message="m")])
        sink.close()
    assert (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines() == [
        HEADER,
        "1,false,65536.0,0.5,,0.1,0.01,,fp16,,,",
        "2,true,65536.0,0.5,,0.1,0.01,,fp16,,,",
    ]


@given(records=st.lists(step_records(), max_size=4))
def test_every_value_is_in_its_cell(tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord]) -> None:
    folder = tmp_path_factory.mktemp("run")
    sink = CsvSink(folder)
    sink.write(records)
    sink.close()
    with (folder / "steps.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        for field in fields(StepRecord):
            value = getattr(record, field.name)
            wanted = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            assert row[field.name] == (wanted if wanted.isprintable() else wanted.encode("unicode_escape").decode())
    assert (folder / "steps.csv").read_text(encoding="utf-8").count("\n") == len(records) + 1


def test_a_torn_row_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(f"{HEADER}\n1,fal", encoding="utf-8")
    sink = CsvSink(tmp_path)
    sink.write([step(2)])
    sink.close()
    assert (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()[1:] == ["1,fal", "2,false,65536.0,0.5,,0.1,0.01,,fp16,,,"]


@pytest.mark.parametrize("found", ["a,b\n", "step,skipped\n1,false\n", f"{HEADER},more\n", "\n"])
def test_other_columns_are_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / "steps.csv").write_text(found, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"Cannot add to .*steps\.csv: its columns are .*{HEADER}'\. Move the file away"):
        CsvSink(tmp_path)
    assert (tmp_path / "steps.csv").read_text(encoding="utf-8") == found
