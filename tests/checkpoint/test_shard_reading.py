"""What lies in the files of a folder: that it is a tensor, the one of the index, and that nothing is executed to find that out."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from halfstep.checkpoint.shard_reading import fill
from halfstep.checkpoint.shards import write_shards
from halfstep.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.written_folders import FILE, Hostile, changed, made, place_of, read, replaced, written

DAMAGED = r"__0_0\.distcp is damaged: the data of second is not what was saved\."


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "step-00000001")


def test_what_was_saved_in_another_place_is_read(folder: Path) -> None:
    replaced(folder, "second", saved(torch.arange(6.0) + 20))
    assert read(folder)["second"].tolist() == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(6, dtype=torch.float16),
        torch.zeros(5),
        torch.zeros(6, 1),
        torch.nn.Parameter(torch.zeros(6)),
        torch.zeros(6).to_sparse(),
        [1.0] * 6,
        "text",
    ],
    ids=["type", "size", "dimensions", "parameter", "sparse", "list", "text"],
)
def test_another_thing_than_the_index_says(other: Any, folder: Path) -> None:
    replaced(folder, "second", saved(other))
    with pytest.raises(DamagedCheckpointError, match=DAMAGED):
        read(folder)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"nonsense" * 100, saved(torch.zeros(6))[:-30], saved(torch.zeros(6))[30:]])
def test_no_tensor_at_all(data: bytes, folder: Path) -> None:
    replaced(folder, "second", data)
    with pytest.raises(DamagedCheckpointError, match=DAMAGED):
        read(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_would_run_a_command_does_not(zipped: bool, folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    buffer = io.BytesIO()
    torch.save(Hostile(canary), buffer, _use_new_zipfile_serialization=zipped)
    replaced(folder, "second", buffer.getvalue())
    with pytest.raises(DamagedCheckpointError, match=DAMAGED):
        read(folder)
    assert not canary.exists()


def test_a_program_is_no_tensor(folder: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    replaced(folder, "second", buffer.getvalue())
    with pytest.raises(DamagedCheckpointError, match=DAMAGED):
        read(folder)


def test_a_file_that_is_a_folder(folder: Path) -> None:
    def shortened(index: Any) -> None:
        for place in index.storage_data.values():
            place.offset = place.length = 0

    changed(folder, shortened)
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: Is a directory\."):
        read(folder)


def test_a_stretch_that_is_too_short(folder: Path) -> None:
    def shorter(index: Any) -> None:
        place_of("second", index).length -= 1

    changed(folder, shorter)
    with pytest.raises(DamagedCheckpointError, match=DAMAGED):
        read(folder)


def test_nothing_is_filled_where_a_target_does_not_fit(folder: Path) -> None:
    targets = {name: torch.full_like(tensor, 5) for name, tensor in made().items()}
    targets["third"] = torch.tensor(5.0)
    with pytest.raises(CheckpointError, match=r"third is float32, and int64 in .*step-00000001\."):
        fill(targets, folder)
    assert all(bool((each == 5).all()) for each in targets.values())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
def test_every_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = torch.randn(shape)
    write_shards({"x": whole}, tmp_path, group=None)
    target = torch.full(shape, 9.0)
    fill({"x": target}, tmp_path)
    assert torch.equal(target, whole)
