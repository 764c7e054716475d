"""Files that are replaced while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.archive import verify
from halfstep.checkpoint import load_checkpoint, reading, save_checkpoint
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import CheckpointRecord


def engine() -> MixedPrecision:
    model = nn.Linear(2, 1)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_newer_file_is_loaded(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp, path = engine(), tmp_path / "last.pt"
    save_checkpoint(path, amp, step=1)
    seen: list[int] = []

    def replaced(file: Path) -> CheckpointRecord:
        record = verify(file)
        if not seen:
            save_checkpoint(path, amp, step=2)
        seen.append(record.step)
        if moment == "before" and len(seen) == 1:
            raise DamagedCheckpointError("It was written to while it was read.")
        return record

    monkeypatch.setattr(reading, "verify", replaced)
    assert load_checkpoint(path, engine()).step == 2
    assert seen == [1, 2]


def test_a_file_that_never_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp, path = engine(), tmp_path / "last.pt"
    save_checkpoint(path, amp, step=1)

    def replaced(file: Path) -> CheckpointRecord:
        record = verify(file)
        save_checkpoint(path, amp, step=1)
        return record

    monkeypatch.setattr(reading, "verify", replaced)
    with pytest.raises(CheckpointError, match="was replaced by another process each time that it was read"):
        load_checkpoint(path, engine())


def test_a_damaged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, engine(), step=1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    count = []

    def counted(file: Path) -> CheckpointRecord:
        count.append(file)
        return verify(file)

    monkeypatch.setattr(reading, "verify", counted)
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        load_checkpoint(path, engine())
    assert len(count) == 1


@pytest.mark.parametrize("name", ["x" * 300, "missing.pt"])
def test_what_cannot_be_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot read|There is no checkpoint at"):
        load_checkpoint(tmp_path / name, engine())


def test_a_folder_of_checkpoints_is_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-00000007.pt", engine(), step=7)
    with pytest.raises(CheckpointError, match=r"is no checkpoint, but holds 1 of them. Name one, such as .*0007\.pt, or use Checkp"):
        load_checkpoint(tmp_path, engine())
