"""What a checkpoint says about itself, as a record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfstep.records import CHECKPOINT_SCHEMA, CheckpointRecord, FileRecord, FolderRecord, Inspection, Inspections, PartRecord

CHECKPOINT = CheckpointRecord(
    step=100,
    time="2026-01-31T12:00:00+00:00",
    halfstep="0.1.0",
    torch="2.13.0",
    python="3.11.7",
    device="cpu",
    ranks=1,
    rank=0,
    engines=(),
    parts=(PartRecord(name="model", tensors=2, bytes=40),),
    tensors=(),
)
FOUND = Inspection(path="step-00000100.pt", kind="file", bytes=40, fault="", checkpoint=CHECKPOINT)


def test_the_number_of_the_format_is_written_by_itself() -> None:
    folder = FolderRecord(checkpoint=CHECKPOINT, files=(FileRecord(file=".metadata", offset=0, length=3, crc32=7),))
    assert (CHECKPOINT.schema, folder.schema, folder.files[0].name) == (CHECKPOINT_SCHEMA, CHECKPOINT_SCHEMA, "")
    assert f'"schema": {CHECKPOINT_SCHEMA}' in CHECKPOINT.to_json()


@pytest.mark.parametrize(("fault", "valid"), [("", True), ("It is cut short.", False)])
def test_what_has_no_fault_is_valid(fault: str, valid: bool) -> None:
    found = replace(FOUND, fault=fault)
    assert found.is_valid is valid
    assert Inspections(inspections=(FOUND, found, FOUND)).has_findings is not valid


def test_where_nothing_was_looked_at_nothing_is_wrong() -> None:
    assert not Inspections(inspections=()).has_findings
