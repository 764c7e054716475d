"""Checkpoints that are folders."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from halfstep.archive import folders, read_folder, read_record, verify, verify_stretches, write_folder_record
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import FileRecord, FolderRecord
from tests.archive import samples

FILES = ("__0_0.distcp", "__1_0.distcp", "rank-0.pt", "rank-1.pt", ".metadata")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.folder(tmp_path / "step-00000100")


def rewritten(path: Path, **changes: object) -> None:
    """Says something else in `checkpoint.json`, with a digest that is right."""
    write_folder_record(path, replace(read_folder(path), **changes))  # type: ignore[arg-type]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


class TestWhole:
    def test_it_says_what_it_holds(self, path: Path) -> None:
        assert verify(path) == read_record(path) == read_folder(path).checkpoint == samples.record(ranks=2)

    def test_its_record_is_a_line_and_the_digest_of_that(self, path: Path) -> None:
        line, signature = (path / "checkpoint.json").read_text().splitlines()
        assert json.loads(line)["checkpoint"]["ranks"] == 2
        assert signature == f"sha256:{hashlib.sha256(line.encode()).hexdigest()}"

    def test_a_link_to_it_is_one(self, path: Path) -> None:
        path.with_name("latest").symlink_to(path.name)
        assert verify(path.with_name("latest")) == samples.record(ranks=2)

    def test_a_file_of_others_in_it_is_no_fault(self, path: Path) -> None:
        (path / "notes.txt").write_text("It went well.")
        (path / "logs").mkdir()
        assert verify(path) == samples.record(ranks=2)

    def test_stretches_may_be_named_in_any_order(self, path: Path) -> None:
        rewritten(path, files=tuple(reversed(read_folder(path).files)))
        assert verify(path) == samples.record(ranks=2)

    def test_a_file_may_be_empty(self, path: Path) -> None:
        (path / "empty").touch()
        rewritten(path, files=(*read_folder(path).files, FileRecord(file="empty", offset=0, length=0, crc32=0)))
        assert verify(path) == samples.record(ranks=2)


class TestDamage:
    def test_no_byte_of_any_file_can_be_another(self, path: Path) -> None:
        for file in sorted(path.iterdir()):
            for place in range(0, file.stat().st_size, 1 if file.stat().st_size < 200 else 23):
                flip(file, place)
                with pytest.raises(DamagedCheckpointError, match=r"^.*step-00000100 is "):
                    verify(path)
                flip(file, place)
        assert verify(path) == samples.record(ranks=2)

    def test_no_byte_of_what_it_says_of_itself_can_be_another(self, path: Path) -> None:
        file = path / "checkpoint.json"
        for place in [*range(0, file.stat().st_size, 7), *range(file.stat().st_size - 80, file.stat().st_size)]:
            flip(file, place)
            with pytest.raises(DamagedCheckpointError, match=r"^.*step-00000100 is damaged: its checkpoint\.json is not what was saved\.$"):
                read_record(path)
            flip(file, place)

    @pytest.mark.parametrize(
        ("file", "place", "what"),
        [
            ("__1_0.distcp", 59, r"the data of model\.spread \(in __1_0\.distcp\) is"),
            ("__1_0.distcp", 60, r"the data of optimizer\.spread \(in __1_0\.distcp\) is"),
            ("rank-0.pt", 0, r"its file rank-0\.pt is"),
            (".metadata", 3, r"its file \.metadata is"),
        ],
    )
    def test_a_stretch_is_named_in_words_of_the_user(self, path: Path, file: str, place: int, what: str) -> None:
        flip(path / file, place)
        assert read_record(path) == samples.record(ranks=2)
        with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100 is damaged: {what} not what was saved\.$"):
            verify(path)

    def test_others_in_the_file_are_counted(self, path: Path) -> None:
        (path / "__0_0.distcp").write_bytes(bytes(100))
        with pytest.raises(DamagedCheckpointError, match=r"\(in __0_0\.distcp\) is not what was saved, nor is another part\.$"):
            verify(path)

    @pytest.mark.parametrize("file", FILES)
    def test_a_file_that_is_missing_is_named(self, path: Path, file: str) -> None:
        (path / file).unlink()
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100 is damaged: its file {file} is missing\.$"):
                check(path)

    @pytest.mark.parametrize("file", FILES)
    def test_a_file_that_is_cut_is_named(self, path: Path, file: str) -> None:
        size = (path / file).stat().st_size
        os.truncate(path / file, size - 1)
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=rf"is cut short: its file {file} has {size - 1:,} of {size:,} bytes\.$"):
                check(path)

    def test_a_file_that_goes_on_is_named(self, path: Path) -> None:
        with (path / "rank-1.pt").open("ab") as file:
            file.write(b"more")
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=r"damaged: its file rank-1\.pt has 4 bytes more than were saved\.$"):
                check(path)

    def test_two_files_cannot_be_swapped(self, path: Path) -> None:
        (path / "rank-0.pt").rename(path / "swapped")
        (path / "rank-1.pt").rename(path / "rank-0.pt")
        (path / "swapped").rename(path / "rank-1.pt")
        with pytest.raises(DamagedCheckpointError, match=r"its file rank-0\.pt is not what was saved"):
            verify(path)

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
    def test_what_is_no_file_is_not_read(self, path: Path, make: object) -> None:
        (path / ".metadata").unlink()
        make(path / ".metadata")  # type: ignore[operator]
        with pytest.raises(DamagedCheckpointError, match=r"\.metadata is no checkpoint of halfstep, but a (folder|pipe)\.$"):
            verify(path)


class TestShares:
    def test_ranks_share_the_work(self, path: Path) -> None:
        files = read_folder(path).files
        flip(path / "__1_0.distcp", 0)
        verify_stretches(path, [file for file in files if file.file != "__1_0.distcp"])
        verify_stretches(path, [file for file in files if file.name == "optimizer.spread"])
        verify_stretches(path, [])
        with pytest.raises(DamagedCheckpointError, match=r"the data of model\.spread \(in __1_0\.distcp\) is not what was saved"):
            verify_stretches(path, [file for file in files if file.name == "model.spread"])

    def test_a_file_that_ends_before_its_stretch_is_cut_short(self, path: Path) -> None:
        os.truncate(path / "__0_0.distcp", 60)
        first, second = [file for file in read_folder(path).files if file.file == "__0_0.distcp"]
        verify_stretches(path, [first])
        with pytest.raises(DamagedCheckpointError, match=r"is cut short: its file __0_0\.distcp has 60 of 100 bytes\.$"):
            verify_stretches(path, [second])


class TestItsRecord:
    def test_a_folder_without_one_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(DamagedCheckpointError, match=r"is no checkpoint of halfstep: it has no checkpoint\.json\.$"):
            verify(tmp_path)

    def test_one_of_torch_alone_is_recognised(self, tmp_path: Path) -> None:
        (tmp_path / ".metadata").touch()
        with pytest.raises(DamagedCheckpointError, match=r"it has no checkpoint\.json\. It seems to be one of torch\.distrib"):
            verify(tmp_path)

    @pytest.mark.parametrize(("content", "what"), [(b"", "is empty"), (b"\n", "is not what was saved"), (b"{}", "is not what was saved")])
    def test_one_without_a_digest_is_damaged(self, path: Path, content: bytes, what: str) -> None:
        (path / "checkpoint.json").write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100 is damaged: its checkpoint\.json {what}\.$"):
            read_folder(path)

    @pytest.mark.parametrize("text", [b"no JSON", b"[]", b"{}", b"[" * 100_000])
    def test_one_that_says_nothing_is_damaged(self, path: Path, text: bytes) -> None:
        (path / "checkpoint.json").write_bytes(b"%b\nsha256:%b\n" % (text, hashlib.sha256(text).hexdigest().encode()))
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json is damaged: what it says about itself cannot be read"):
            read_folder(path)

    def test_one_of_a_newer_halfstep_says_what_to_do(self, path: Path) -> None:
        rewritten(path, schema=7)
        with pytest.raises(DamagedCheckpointError, match=r"was written by a newer halfstep: its format has the number 7, .*\. Upgrade"):
            read_folder(path)

    def test_one_too_large_to_be_one_is_not_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.truncate(path / "checkpoint.json", 1 << 40)  # Of nothing: it takes no room.
        with pytest.raises(DamagedCheckpointError, match=r"its checkpoint\.json is not what was saved"):
            read_folder(path)

    @pytest.mark.parametrize("name", ["", ".", "..", "../rank-0.pt", "/etc/passwd", "a/b", "a\\b", "a\0b", "checkpoint.json"])
    def test_names_lead_nowhere_else(self, path: Path, name: str) -> None:
        rewritten(path, files=(FileRecord(file=name, offset=0, length=1, crc32=0),))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its checkpoint\.json names a file '.*', which cannot be in it\.$"):
            read_folder(path)

    @pytest.mark.parametrize(
        "spans", [[(1, 5)], [(0, 5), (6, 5)], [(0, 5), (4, 5)], [(0, 5), (0, 5)], [(0, -1)], [(0, 5), (5, -2), (3, 4)]]
    )
    def test_every_byte_belongs_to_one_stretch(self, path: Path, spans: list[tuple[int, int]]) -> None:
        rewritten(path, files=tuple(FileRecord(file="f", offset=offset, length=length, crc32=0) for offset, length in spans))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its checkpoint\.json does not tell what all bytes of f are\.$"):
            read_folder(path)

    def test_it_is_flushed(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed = []
        monkeypatch.setattr(os, "fsync", lambda _: flushed.append((path / "checkpoint.json").read_bytes()))
        rewritten(path, files=())
        assert flushed == [(path / "checkpoint.json").read_bytes()]

    def test_a_full_disk_is_named(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"^Cannot write .*checkpoint\.json: the disk is full \(\d+ bytes are needed and"):
            rewritten(path, files=())

    def test_too_many_names_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folders, "LARGEST_MANIFEST", 100)
        with pytest.raises(CheckpointError, match=r"the names of its 4 tensors take [\d.]+ \w+, and up to 100 bytes are allowed\. Keep"):
            write_folder_record(tmp_path, FolderRecord(checkpoint=samples.record(), files=()))
        assert not [*tmp_path.iterdir()]
