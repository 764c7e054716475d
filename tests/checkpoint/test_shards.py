"""Tensors that are spread over ranks, in a folder: what comes back, what is refused, and that nobody waits for a rank that failed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from halfstep.checkpoint.shards import read_shards, shard_shapes, write_shards
from halfstep.errors import CheckpointError
from halfstep.records.checkpoint import FileRecord
from tests.checkpoint import sharded_ranks
from tests.ranks import run_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    path.mkdir()
    return path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def assert_complete(records: tuple[FileRecord, ...], folder: Path) -> None:
    """The stretches cover each byte of each file once, and their checksums are right."""
    ends: dict[str, int] = {}
    for record in records:
        assert record.offset == ends.get(record.file, 0)
        ends[record.file] = record.offset + record.length
        data = (folder / record.file).read_bytes()[record.offset : record.offset + record.length]
        assert record.crc32 == zlib.crc32(data)
    assert ends == {path.name: path.stat().st_size for path in folder.iterdir()}


class TestAnyNumberOfRanks:
    def test_two_ranks_write_and_others_read(self, folder: Path, tmp_path: Path) -> None:
        (records, expected), second = run_ranks(sharded_ranks.write, folder, tmp_path=tmp_path)
        assert second[0] == records
        assert_same(second[1], expected)
        assert_complete(records, folder)
        assert {record.name for record in records} == {*expected, ""}
        assert [record.file for record in records if not record.name] == [".metadata"]
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()} == shard_shapes(folder)
        for size in (1, 2, 3, 4):
            for found in run_ranks(sharded_ranks.read, folder, tmp_path=tmp_path, size=size):
                assert_same(found, expected)
        alone = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
        read_shards(alone, folder, group=None)
        assert_same(alone, expected)
        assert_same(loaded_by_torch(expected, folder), expected)

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_any_number_writes(self, size: int, folder: Path, tmp_path: Path) -> None:
        for records, expected in run_ranks(sharded_ranks.write, folder, tmp_path=tmp_path, size=size):
            assert_complete(records, folder)
            alone = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
            read_shards(alone, folder, group=None)
            assert_same(alone, expected)

    def test_groups_of_some_of_the_ranks(self, folder: Path, tmp_path: Path) -> None:
        for name in "01":
            (folder / name).mkdir()
        for rank, found in enumerate(run_ranks(sharded_ranks.subgroups, folder, tmp_path=tmp_path, size=4)):
            assert torch.equal(found["theirs"], torch.arange(7.0) + 10 * (1 - rank // 2))
            assert torch.equal(found["first"], torch.arange(7.0))

    def test_a_tensor_that_is_cut_along_two_dimensions(self, folder: Path, tmp_path: Path) -> None:
        assert run_ranks(sharded_ranks.two_dimensions, folder, tmp_path=tmp_path, size=4) == [[True] * 4] * 4

    def test_a_mesh_of_some_of_the_ranks(self, folder: Path, tmp_path: Path) -> None:
        found = run_ranks(sharded_ranks.part_of_the_ranks, folder, tmp_path=tmp_path, size=3)
        assert found == [[[0, 1, 2], [1, 1]], [[3, 4], [1, 1]], [[], [1, 1]]]


def loaded_by_torch(expected: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - slow to import

    targets = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        load(targets, checkpoint_id=folder)
    return targets


class TestOneProcess:
    def test_what_is_written_alone_is_read_alone(self, folder: Path) -> None:
        made = sharded_ranks.plain()
        records = write_shards(made, folder, group=None)
        assert_complete(records, folder)
        targets = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in made.items()}
        read_shards(targets, folder, group=None)
        assert_same(targets, sharded_ranks.wholes(made))

    def test_targets_keep_their_place_and_need_not_be_contiguous(self, folder: Path) -> None:
        write_shards({"x": torch.arange(12.0).view(3, 4)}, folder, group=None)
        holder = torch.zeros(4, 6)
        parameter = torch.nn.Parameter(holder.t()[1:4])
        read_shards({"x": parameter}, folder, group=None)
        assert torch.equal(holder[:, 1:4], torch.arange(12.0).view(3, 4).t())
        assert (holder[:, 0] == 0).all()
        assert parameter.requires_grad
        assert parameter.grad_fn is None

    def test_fewer_targets_than_there_are_tensors(self, folder: Path) -> None:
        write_shards({"x": torch.ones(2), "y": torch.ones(3)}, folder, group=None)
        target = torch.zeros(3)
        read_shards({"y": target}, folder, group=None)
        assert target.tolist() == [1, 1, 1]

    def test_nothing_at_all(self, folder: Path) -> None:
        records = write_shards({}, folder, group=None)
        assert_complete(records, folder)
        assert [(record.file, record.length == 0) for record in records] == [("__0_0.distcp", True), (".metadata", False)]
        assert shard_shapes(folder) == {}
        read_shards({}, folder, group=None)

    def test_the_index_does_not_tell_where_it_was_written(self, folder: Path) -> None:
        write_shards({"x": torch.ones(2)}, folder, group=None)
        assert folder.name.encode() not in (folder / ".metadata").read_bytes()

    def test_reading_alone_imports_none_of_what_is_slow(self, folder: Path) -> None:
        write_shards({"x": torch.ones(2)}, folder, group=None)
        code = (
            "import sys, torch; from pathlib import Path; from halfstep.checkpoint.shards import read_shards\n"
            f"x = torch.zeros(2); read_shards({{'x': x}}, Path({str(folder)!r}), group=None); assert x.tolist() == [1, 1]\n"
            "print([name for name in ('torch.distributed.checkpoint', 'torch.distributed.tensor') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"

    def test_a_build_without_distributed_cannot_write_and_can_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_shards({"x": torch.ones(2)}, folder, group=None)
        monkeypatch.setattr(dist, "is_available", lambda: False)
        with pytest.raises(CheckpointError, match=r"step-00000001 could not be written: this build of torch has no torch\.distributed\."):
            write_shards({"x": torch.ones(2)}, folder, group=None)
        target = torch.zeros(2)
        read_shards({"x": target}, folder, group=None)
        assert target.tolist() == [1, 1]

    def test_a_sparse_tensor_is_refused(self, folder: Path) -> None:
        with pytest.raises(
            CheckpointError, match=r"could not be written: x is a tensor with the layout torch\.sparse_coo, which cannot be stored"
        ):
            write_shards({"x": torch.eye(2).to_sparse()}, folder, group=None)

    def test_files_are_flushed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed: list[int] = []
        flush = os.fsync

        def noted(descriptor: int) -> None:
            flushed.append(os.fstat(descriptor).st_ino)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", noted)
        write_shards({"x": torch.ones(2)}, folder, group=None)
        assert flushed == [(folder / name).stat().st_ino for name in ("__0_0.distcp", ".metadata")]


class TestFailuresOfOneRank:
    """Each is told on both ranks; none of these tests may run into its time limit."""

    def test_a_rank_that_cannot_write(self, folder: Path, tmp_path: Path) -> None:
        first, second = run_ranks(sharded_ranks.failures, folder, tmp_path=tmp_path, timeout_s=60)
        assert len(first) == 2 * len(sharded_ranks.FAILURES)
        for number, reason in enumerate(sharded_ranks.FAILURES):
            for guilty in (0, 1):
                told = [first[reason, guilty], second[reason, guilty]]
                if reason == "KeyboardInterrupt":
                    assert told.pop(guilty) == "KeyboardInterrupt: ", "it stays one where it was"
                for text in told:
                    start = f"CheckpointError: {folder / f'{number}-{guilty}'} could not be written: on rank {guilty}, {reason}"
                    assert text == start or (reason.startswith("IsADirectoryError") and text.startswith(start))

    def test_what_cannot_be_written_or_read(self, folder: Path, tmp_path: Path) -> None:
        first, second = run_ranks(sharded_ranks.misuse, folder, tmp_path=tmp_path, timeout_s=60)
        for found in (first, second):
            assert found["index"].startswith(f"CheckpointError: {folder / 'index'} could not be written: on rank 0, IsADirectoryError: ")
            assert ".metadata.tmp" in found["index"]
            for rank in (0, 1):
                assert f"on rank {rank}, RuntimeError: Checkpoint already exists" in found["twice"]
                told = f"on rank {rank}, ValueError: Any checkpointing related operations are not supported for DTensor with partial"
                assert told in found["write sum"]
                assert told in found["read sum"]
            assert f"{folder / 'sum'} could not be loaded: " in found["read sum"]
        assert first["alone"].startswith(f"CheckpointError: {folder / 'alone'} could not be written: ")
        assert "the parts of x do not make up all of it" in first["alone"]

    def test_a_rank_that_cannot_read(self, folder: Path, tmp_path: Path) -> None:
        missing, unreadable = tmp_path / "elsewhere", tmp_path / "unreadable"
        (unreadable / ".metadata").mkdir(parents=True)
        told = run_ranks(sharded_ranks.reading_failures, folder, [missing, unreadable], tmp_path=tmp_path, timeout_s=60)
        for rank, found in enumerate(told):
            for guilty in (0, 1):
                assert found[missing, guilty] == f"DamagedCheckpointError: {missing} is damaged: its file .metadata is missing."
                own = unreadable if rank == guilty else folder
                reason = f"on rank {guilty}, {unreadable / '.metadata'} cannot be read: Is a directory."
                assert found[unreadable, guilty] == f"CheckpointError: {own} could not be loaded: {reason}"


class TestUnfittingTargets:
    @pytest.mark.parametrize(
        ("name", "target", "text"),
        [
            ("y", torch.ones(2, 3), r"y is not in .*step-00000001\."),
            ("x", torch.ones(3, 2), r"x has the shape \[3, 2\], and \[2, 3\] in .*step-00000001\."),
            ("x", torch.ones(2, 3, 1), r"x has the shape \[2, 3, 1\], and \[2, 3\] in .*step-00000001\."),
            ("x", torch.ones(2, 3).half(), r"x is float16, and float32 in .*step-00000001\."),
        ],
    )
    def test_they_are_told_and_left_alone(self, name: str, target: Tensor, text: str, folder: Path) -> None:
        write_shards({"x": torch.zeros(2, 3), "a": torch.zeros(1)}, folder, group=None)
        other = torch.ones(1)
        with pytest.raises(CheckpointError, match=text):
            read_shards({"a": other, name: target}, folder, group=None)
        assert bool((target == 1).all())
        assert other.item() == 1
