"""What a sealed file is: one that torch and Python read, and of which every byte is accounted for."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from halfstep.archive import read_record, seal, sealing, verify
from halfstep.archive.checksums import checksums
from halfstep.errors import CheckpointError, DamagedCheckpointError
from tests.archive import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-00000100.pt"


def same(loaded: Any) -> bool:
    expected = samples.state()
    return all(torch.equal(loaded["model"][name], expected["model"][name]) for name in expected["model"]) and torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"]
    )


class TestTheFile:
    @pytest.mark.parametrize("mmap", [True, False])
    def test_torch_reads_it(self, path: Path, mmap: bool) -> None:
        assert same(torch.load(samples.sealed(path), weights_only=True, mmap=mmap))

    def test_python_finds_its_checksums_right(self, path: Path) -> None:
        command = [sys.executable, "-m", "zipfile", "-t", str(samples.sealed(path))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Done testing\n", "")

    def test_the_data_stay_where_they_were(self, path: Path) -> None:
        before = samples.saved(path).read_bytes()
        seal(path, samples.record())
        after = path.read_bytes()
        assert samples.frame(after) == samples.frame(before)
        end = samples.frame(before)[-1][1]
        assert after[:end] == before[:end]

    def test_each_record_has_its_checksum(self, path: Path) -> None:
        content = samples.sealed(path).read_bytes()
        with zipfile.ZipFile(path) as archive:
            for info, (begin, end) in zip(archive.infolist(), samples.frame(content), strict=False):
                assert zlib.crc32(content[begin:end]) == info.CRC

    def test_the_comment_is_the_digest_of_the_rest(self, path: Path) -> None:
        content = samples.sealed(path).read_bytes()
        with zipfile.ZipFile(path) as archive:
            assert archive.comment == f"halfstep:{samples.digest(content)}".encode()
        assert content.endswith(archive.comment)

    def test_it_says_what_it_holds(self, path: Path) -> None:
        assert read_record(samples.sealed(path)) == samples.record()
        with zipfile.ZipFile(path) as archive:
            assert archive.read("archive/halfstep.json") == samples.record().to_json().encode()

    def test_the_same_state_makes_the_same_file(self, path: Path, tmp_path: Path) -> None:
        assert samples.sealed(path).read_bytes() == samples.sealed(tmp_path / "other.pt").read_bytes()

    def test_a_file_that_torch_wrote_with_checksums_is_sealed_as_well(self, path: Path) -> None:
        torch.save(samples.state(), path)
        seal(path, samples.record())
        assert verify(path) == samples.record()
        assert same(torch.load(path, weights_only=True))

    def test_a_file_without_tensors_is_sealed_as_well(self, path: Path) -> None:
        torch.save({"step": 3}, path)
        seal(path, samples.record(tensors=()))
        assert verify(path).tensors == ()

    @pytest.mark.parametrize("name", ["Gewicht-ä-重み.pt", "with blanks and ' quotes.pt"])
    def test_any_name_will_do(self, tmp_path: Path, name: str) -> None:
        torch.save(samples.state(), tmp_path / name)
        seal(tmp_path / name, samples.record())
        assert verify(tmp_path / name) == samples.record()
        assert same(torch.load(tmp_path / name, weights_only=True))

    @pytest.mark.parametrize("limit", ["ZIP64_LIMIT", "ZIP_FILECOUNT_LIMIT"])
    def test_archives_too_large_for_32_bits_have_other_end_records(self, path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
        plain = samples.sealed(path).stat().st_size
        # Python's zipfile takes these for what 32 and 16 bits hold.
        monkeypatch.setattr(zipfile, limit, 2)
        samples.sealed(path)
        assert path.stat().st_size > plain
        assert b"PK\x06\x06" in path.read_bytes()
        assert verify(path) == samples.record()
        assert same(torch.load(path, weights_only=True, mmap=True))

    def test_tensors_of_many_sizes_are_summed_up_by_two_threads(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[threading.Thread] = []
        start = threading.Thread.start

        def count(thread: threading.Thread) -> None:
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", count)
        samples.saved(path, extra=[torch.full((size,), 7, dtype=torch.uint8) for size in (5 << 20, 3, 0, 3 << 20, (1 << 20) + 1)])
        seal(path, samples.record())
        assert len(started) == 2  # One flushes, and one sums up beside this one.
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


class TestThreads:
    def test_without_new_threads_it_is_done_one_after_the_other(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: threading.Thread) -> NoReturn:
            raise RuntimeError("can't start new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert verify(samples.sealed(path)) == samples.record()

    def test_it_is_sealed_while_python_shuts_down(self, path: Path) -> None:
        imports = "import atexit; from pathlib import Path; from tests.archive.samples import sealed"
        program = f"{imports}; atexit.register(sealed, Path({str(path)!r}))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert verify(path) == samples.record()


class TestOnDisk:
    def test_it_is_flushed_when_all_is_written(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed = []
        flush = os.fsync

        def note(descriptor: int) -> None:
            flushed.append(path.read_bytes())
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", note)
        samples.sealed(path)
        assert flushed[-1] == path.read_bytes()

    def test_its_data_are_flushed_meanwhile(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed = []
        monkeypatch.setattr(sealing, "_flush_data", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
        samples.sealed(path)
        assert flushed == [path.stat().st_ino]


class TestErrors:
    @pytest.mark.parametrize("where", ["_flush_data", "frame_digest", "_write_directory"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_named_with_what_is_needed(self, path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> None:
        def full(*_: object, **__: object) -> NoReturn:
            raise OSError(number, "No space left on device")

        monkeypatch.setattr(sealing, where, full)
        message = (
            r"^Cannot write .*step-00000100\.pt: the disk is full \([\d.]+ KiB are needed and [\d.]+ [KMGT]iB are free\)\. Older "
            r"checkpoints are untouched\. Free some space, or keep fewer checkpoints\.$"
        )
        with pytest.raises(CheckpointError, match=message):
            samples.sealed(path)

    def test_a_disk_that_fails_is_named(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: int) -> NoReturn:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(sealing, "_flush_data", fail)
        with pytest.raises(CheckpointError, match=r"^Cannot write .*\.pt: Input/output error\. Older checkpoints are untouched\.$"):
            samples.sealed(path)

    def test_a_file_that_may_not_grow_is_named_and_nothing_else_is_said(self, path: Path) -> None:
        program = (
            "import resource, sys; from pathlib import Path; from halfstep.archive import seal; from tests.archive import samples\n"
            f"path = samples.saved(Path({str(path)!r}))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))\n"
            "seal(path, samples.record())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr.endswith(f"CheckpointError: Cannot write {path}: File too large. Older checkpoints are untouched.\n")
        assert "Exception ignored" not in done.stderr

    def test_a_file_that_is_not_there_is_named(self, path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"^Cannot write .*step-00000100\.pt: No such file or directory\."):
            seal(path, samples.record())

    @pytest.mark.parametrize("content", [b"", b"text", b"PK\x05\x06" + b"\0" * 18, b"PK\x03\x04" + b"\0" * 200])
    def test_what_torch_did_not_write_is_refused(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"^Cannot seal .*\.pt: it is sealed already, or no file that torch\.save wrote"):
            seal(path, samples.record())
        assert path.read_bytes() == content

    def test_nothing_is_sealed_twice(self, path: Path) -> None:
        content = samples.sealed(path).read_bytes()
        with pytest.raises(CheckpointError, match=r"^Cannot seal .*\.pt: it is sealed already"):
            seal(path, samples.record())
        assert path.read_bytes() == content

    def test_a_record_of_the_name_of_ours_is_refused(self, path: Path) -> None:
        samples.saved(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("archive/halfstep.json", "{}")
        with pytest.raises(CheckpointError, match=r"^Cannot seal .*\.pt: it has a record halfstep\.json"):
            seal(path, samples.record())

    def test_too_many_names_are_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sealing, "LARGEST_MANIFEST", 1000)
        many = tuple(replace(samples.TENSORS[0], name=f"model.{number}") for number in range(20))
        with pytest.raises(CheckpointError, match=r"the names of its 20 tensors take 1\.\d KiB, and up to 1000 bytes are allowed\. Keep"):
            samples.sealed(path, samples.record(tensors=many))


def test_sums_that_are_known_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(samples.sealed(tmp_path / "other.pt")) as file:
        sums = {each.filename.partition("/")[2]: each.CRC for each in file.infolist() if "/data/" in each.filename}
        count = len(file.infolist()) - 1
    read: list[int] = []

    def noted(path: Path, spans: Any) -> list[int]:
        read.append(len(spans))
        return checksums(path, spans)

    monkeypatch.setattr(sealing, "checksums", noted)
    path = samples.saved(tmp_path / "a.pt")
    seal(path, samples.record(), sums=sums)
    assert verify(path) == samples.record()
    assert read == [count - len(sums)]
    assert len(sums) == 3


def test_a_sum_that_is_wrong_makes_no_valid_checkpoint(tmp_path: Path) -> None:
    path = samples.saved(tmp_path / "a.pt")
    seal(path, samples.record(), sums={"data/0": 1})
    with pytest.raises(DamagedCheckpointError, match=r"the data of model\.table"):
        verify(path)
