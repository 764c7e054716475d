"""How a checkpoint is verified, and what is said of one that is damaged."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfstep.archive import frames, manifests, read_record, seal, verification, verify
from halfstep.archive.checksums import checksums
from halfstep.errors import CheckpointError, DamagedCheckpointError
from tests.archive import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-00000100.pt"


def changed(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def data(path: Path, number: int) -> int:
    """Where the data of a record begin; the structure's is number 0, and the first tensor's number 4."""
    return samples.frame(path.read_bytes())[number][0]


class TestData:
    @pytest.mark.parametrize(
        ("number", "what"),
        [
            (0, r"the structure \(data\.pkl\)"),
            (1, r"its record \.format_version"),
            (3, r"its record byteorder"),
            (4, r"the data of model\.table and 1 more \(data/0\)"),
            (6, r"the data of optimizer\.state\.0\.exp_avg \(data/2\)"),
            (8, r"its record \.data/serialization_id"),
        ],
    )
    def test_a_part_is_named_in_words_of_the_user(self, path: Path, number: int, what: str) -> None:
        place = data(samples.sealed(path), number)
        changed(path, place, b"\x7f")
        with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100\.pt is damaged: {what} is not what was saved\.$"):
            verify(path)

    @pytest.mark.parametrize(("numbers", "others"), [((4, 6), ", nor is another part"), ((0, 4, 6), ", nor are 2 other parts")])
    def test_others_are_counted(self, path: Path, numbers: tuple[int, ...], others: str) -> None:
        samples.sealed(path)
        for number in numbers:
            changed(path, data(path, number), b"\x7f")
        with pytest.raises(DamagedCheckpointError, match=rf"is not what was saved{others}\.$"):
            verify(path)

    def test_a_record_that_no_tensor_names_is_named_itself(self, path: Path) -> None:
        samples.sealed(path, samples.record(tensors=()))
        changed(path, data(path, 4), b"\x7f")
        with pytest.raises(DamagedCheckpointError, match=r"its record data/0 is not what was saved"):
            verify(path)

    def test_a_tensor_may_lie_in_several_records(self, path: Path) -> None:
        samples.sealed(path, samples.record(tensors=(samples.tensor("model.sparse", "data/0,data/2"),)))
        assert verify(path).tensors[0].storage == "data/0,data/2"
        changed(path, data(path, 6), b"\x7f")
        with pytest.raises(DamagedCheckpointError, match=r"the data of model\.sparse \(data/2\) is not what was saved"):
            verify(path)

    def test_what_is_not_read_is_not_seen(self, path: Path) -> None:
        place = data(samples.sealed(path), 4)
        changed(path, place, b"\x7f")
        assert read_record(path) == samples.record()

    def test_a_name_cannot_move_the_cursor_or_fill_the_screen(self, path: Path) -> None:
        samples.sealed(path, samples.record(tensors=(samples.tensor("a\x1b[2J\n\u202e" + 1000 * "b", "data/0"),)))
        changed(path, data(path, 4), b"\x7f")
        with pytest.raises(DamagedCheckpointError, match=r"the data of a\\x1b\[2J\\n\\u202eb{180,200}… \(data/0\)") as caught:
            verify(path)
        assert str(caught.value).isprintable()


class TestFrame:
    @pytest.mark.parametrize(
        ("find", "shift", "what"),
        [
            (b"PK\x03\x04", 4, r"the header of its record data\.pkl"),
            (b"PK\x03\x04", 30, r"the header of its record data\.pkl"),
            (b"ZZZZ", 1, r"the header of its record data\.pkl"),
            (b"PK\x03\x04\0\0\x08\x08" + bytes(18) + b"\x0e\0", 12, r"the header of its record data/0"),
            (b"PK\x07\x08", 8, r"the sizes behind its record data\.pkl"),
            (b"PK\x07\x08", 4, r"the sizes behind its record data\.pkl"),
            (b'{"schema"', 2, r"what it says about itself \(halfstep\.json\)"),
            (b"PK\x01\x02", 4, r"its table of contents"),
            (b"PK\x01\x02", 16, r"its table of contents"),
            (b"PK\x01\x02", 0, r"its table of contents"),
            (b"PK\x05\x06", 8, r"its end record"),
            (b"PK\x05\x06", 12, r"its end record"),
            (b"PK\x05\x06", 20, r"its end record"),
            (b"halfstep:", 9, r"its table of contents"),
        ],
    )
    def test_what_lies_around_the_data_is_named(self, path: Path, find: bytes, shift: int, what: str) -> None:
        content = samples.sealed(path).read_bytes()
        place = content.index(find) + shift
        changed(path, place, bytes([content[place] ^ 0x01]))
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100\.pt is damaged: {what} (is|are) not what was saved\.$"):
                check(path)

    def test_a_file_that_is_cut_is_cut_short(self, path: Path) -> None:
        os.truncate(samples.sealed(path), 700)
        with pytest.raises(DamagedCheckpointError, match=r"^.*step-00000100\.pt is cut short: it has no end record\.$"):
            verify(path)

    @pytest.mark.parametrize(("more", "count"), [(b"\0", "1 byte"), (b"x" * 2000, "2,000 bytes")])
    def test_bytes_behind_its_end_are_counted(self, path: Path, more: bytes, count: str) -> None:
        path.write_bytes(samples.sealed(path).read_bytes() + more)
        with pytest.raises(DamagedCheckpointError, match=rf"damaged: there (is|are) {count} behind its end record\.$"):
            verify(path)

    def test_a_file_of_zeros_is_what_a_failing_machine_leaves(self, path: Path) -> None:
        path.write_bytes(bytes(os.path.getsize(samples.sealed(path))))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: it begins with zeros, as a file does that was not yet on disk when"):
            verify(path)

    def test_a_beginning_of_zeros_before_a_right_end_is_damage(self, path: Path) -> None:
        changed(samples.sealed(path), 0, bytes(600))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: the header of its record data\.pkl is not what was saved"):
            verify(path)


def with_directory(path: Path, change: Callable[[bytearray, int], None]) -> None:
    """A checkpoint whose table of contents was changed, at the line of `data/0`, and whose digest is right as far as that can be."""
    content = bytearray(samples.sealed(path).read_bytes())
    line = content.index(b"archive/data/0", content.index(b"PK\x01\x02")) - 46
    change(content, line)
    path.write_bytes(content)


def put(shift: int, kind: str, value: int) -> Callable[[bytearray, int], None]:
    return lambda content, line: struct.pack_into(kind, content, line + shift, value)


class TestTableOfContents:
    """What torch and halfstep never write is refused where it stands, whatever the digest says."""

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(put(8, "<H", 0x0809), id="encrypted"),
            pytest.param(put(8, "<H", 0x2808), id="masked headers"),
            pytest.param(put(10, "<H", 8), id="compressed"),
            pytest.param(put(10, "<H", 99), id="encrypted with AES"),
            pytest.param(put(20, "<L", 5), id="another packed size"),
            pytest.param(put(20, "<Q", 0xFFFFFFFF_FFFFFFFF), id="sizes in an extra field that it lacks"),
            pytest.param(put(42, "<L", 0xFFFFFFFF), id="a place in an extra field that it lacks"),
            pytest.param(put(24, "<L", 0x7FFFFFFF), id="behind the end of the file"),
            pytest.param(put(20, "<Q", 0x7FFFFFFF_7FFFFFFF), id="behind the end of the file, both sizes"),
            pytest.param(put(42, "<L", 0x7FFFFFFF), id="a header behind the end of the file"),
            pytest.param(put(20, "<Q", 0x00000200_00000200), id="over the next one"),
            pytest.param(put(42, "<L", 0), id="the header of another"),
            pytest.param(put(28, "<H", 13), id="a shorter name"),
            pytest.param(put(28, "<H", 0xFFFF), id="a longer name"),
            pytest.param(put(30, "<H", 1), id="an extra field"),
            pytest.param(put(32, "<H", 1), id="a comment"),
            pytest.param(put(34, "<H", 1), id="on another disk"),
            pytest.param(put(59, "<B", ord("1")), id="twice the same name"),
            pytest.param(put(59, "<B", ord("/")), id="a directory"),
            pytest.param(put(59, "<B", 0), id="a NUL in a name"),
            pytest.param(put(59, "<B", 0xFF), id="no UTF-8"),
            pytest.param(put(46, "<B", ord("b")), id="another prefix"),
            pytest.param(put(53, "<B", ord("-")), id="no prefix"),
        ],
    )
    def test_other_lines_are_refused(self, path: Path, change: Callable[[bytearray, int], None]) -> None:
        with_directory(path, change)
        with pytest.raises(
            DamagedCheckpointError, match=r"damaged: (its table of contents|the header of its record \S+) is not what was saved"
        ):
            read_record(path)

    def test_a_wide_extra_field_that_is_too_short_is_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 15)
        content = samples.sealed(path).read_bytes()
        place = content.index(struct.pack("<2H2Q", 1, 24, 16, 16), content.index(b"PK\x01\x02"))
        changed(path, place + 2, struct.pack("<H", 7))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    @pytest.mark.parametrize(
        ("shift", "value"),
        [(4, 1), (6, 1), (8, 3), (10, 0xFFFF), (12, 0xFFFF), (16, 0)],
        ids=["disk", "first disk", "on this disk", "count", "length", "offset"],
    )
    def test_other_end_records_are_refused(self, path: Path, shift: int, value: int) -> None:
        place = samples.sealed(path).read_bytes().index(b"PK\x05\x06")
        changed(path, place + shift, struct.pack("<H", value))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its end record is not what was saved"):
            read_record(path)

    @pytest.mark.parametrize("shift", [-20, -12, -76])
    def test_other_wide_end_records_are_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
        place = samples.sealed(path).read_bytes().index(b"PK\x05\x06") + shift
        changed(path, place, b"\xfe")
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its (end record|table of contents) is not what was saved"):
            read_record(path)

    def test_more_lines_than_there_is_room_for_are_not_read(self, path: Path) -> None:
        place = samples.sealed(path).read_bytes().index(b"PK\x05\x06")
        changed(path, place + 8, struct.pack("<2H", 0xFFFF, 0xFFFF))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    def test_fewer_lines_than_there_are_are_refused(self, path: Path) -> None:
        place = samples.sealed(path).read_bytes().index(b"PK\x05\x06")
        changed(path, place + 8, struct.pack("<2H", 2, 2))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    def test_a_table_too_large_to_be_one_is_not_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        samples.sealed(path)
        monkeypatch.setattr(frames, "_LARGEST_DIRECTORY", 100)
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    def test_an_archive_of_nothing_is_refused(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = b"halfstep:" + b"0" * 64
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    def test_bytes_that_belong_to_nothing_are_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        samples.sealed(path)
        monkeypatch.setattr(frames, "_LARGEST_GAP", 40)
        with pytest.raises(DamagedCheckpointError, match=r"the header of its record data\.pkl is not what was saved"):
            read_record(path)


class TestManifest:
    @pytest.mark.parametrize(
        ("manifest", "what"),
        [
            (b"", "is no valid JSON"),
            (b"no JSON", "is no valid JSON"),
            (b"\xff\xfe\xfd", "is no valid JSON"),
            (b"[" * 100_000, "is no valid JSON"),
            (b'{"step": ' + b"9" * 10_000 + b"}", "is no valid JSON"),
            (b"[]", "an object was expected"),
            (b"null", "an object was expected"),
            (b"{}", "required field missing"),
            (b'{"schema": "1"}', "a whole number was expected"),
            (samples.record(schema=0).to_json().encode(), "the number of its format is 0"),
            (samples.record(schema=-3).to_json().encode(), "the number of its format is -3"),
        ],
    )
    def test_what_says_nothing_about_it_is_refused(self, path: Path, manifest: bytes, what: str) -> None:
        samples.with_manifest(path, manifest)
        with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100\.pt is damaged: .*{what}"):
            verify(path)

    @pytest.mark.parametrize("more", [{}, {"step": "a hundred", "tensors": 3, "signature": []}])
    def test_a_newer_format_is_refused_and_says_what_to_do(self, path: Path, more: dict[str, Any]) -> None:
        samples.with_manifest(path, json.dumps(json.loads(samples.record().to_json()) | more | {"schema": 2}).encode())
        message = r"^.*step-00000100\.pt was written by a newer halfstep: its format has the number 2, and this one reads up to 1\. Upgrade"
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=message):
                check(path)

    def test_fields_that_a_later_halfstep_of_the_same_format_adds_are_passed_over(self, path: Path) -> None:
        samples.with_manifest(path, json.dumps(json.loads(samples.record().to_json()) | {"mood": "good"}).encode())
        assert verify(path) == samples.record()

    def test_a_tensor_without_data_is_named(self, path: Path) -> None:
        samples.sealed(path, samples.record(tensors=(*samples.TENSORS, samples.tensor("model.lost", "data/0,data/3"))))
        for check in (verify, read_record):
            with pytest.raises(DamagedCheckpointError, match=r"damaged: it lacks the data of model\.lost \(data/3\)\.$"):
                check(path)

    def test_a_tensor_need_not_lie_in_a_record(self, path: Path) -> None:
        assert verify(samples.sealed(path, samples.record(tensors=(samples.tensor("model.meta", ""),)))).tensors[0].storage == ""

    def test_one_of_another_file_does_not_fit(self, path: Path, tmp_path: Path) -> None:
        text, other = (samples.record(step=step).to_json().encode() for step in (100, 200))
        content = samples.sealed(path).read_bytes()
        path.write_bytes(content.replace(text, other).replace(struct.pack("<L", zlib.crc32(text)), struct.pack("<L", zlib.crc32(other))))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read_record(path)

    def test_a_sealed_archive_without_one_is_refused(self, path: Path) -> None:
        with zipfile.ZipFile(samples.saved(path), "a") as archive:
            archive.comment = b"halfstep:" + b"0" * 64
        path.write_bytes(samples.resealed(path.read_bytes()))
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its record halfstep\.json is not what was saved"):
            verify(path)

    def test_one_too_large_to_be_one_is_not_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verification, "LARGEST_MANIFEST", 100)
        with pytest.raises(DamagedCheckpointError, match=r"damaged: its record halfstep\.json is not what was saved"):
            verify(samples.sealed(path))
        assert manifests.LARGEST_MANIFEST > 100 << 20


class TestWhatIsNoFile:
    @pytest.mark.parametrize("name", ["none.pt", "no/such/folder.pt", "step-00000100.pt/inside.pt"])
    def test_what_is_not_there(self, tmp_path: Path, path: Path, name: str) -> None:
        samples.sealed(path)
        for check in (verify, read_record):
            with pytest.raises(CheckpointError, match=rf"^There is no checkpoint at .*{name}\.$"):
                check(tmp_path / name)

    def test_a_link_to_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "latest.pt").symlink_to("gone.pt")
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*latest\.pt\.$"):
            verify(tmp_path / "latest.pt")

    def test_a_link_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "a.pt").symlink_to("a.pt")
        with pytest.raises(CheckpointError, match=r"^Cannot read .*a\.pt: Too many levels of symbolic links\.$"):
            verify(tmp_path / "a.pt")

    def test_a_link_to_a_checkpoint_is_one(self, tmp_path: Path, path: Path) -> None:
        samples.sealed(path)
        (tmp_path / "latest.pt").symlink_to(path)
        assert verify(tmp_path / "latest.pt") == samples.record()

    @pytest.mark.parametrize("name", ["a\0b.pt", "a" * 300])
    def test_a_name_that_cannot_be(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(CheckpointError, match=r"^Cannot read .*: (embedded null byte|File name too long)\.$"):
            verify(tmp_path / name)

    def test_a_pipe_is_not_waited_for(self, path: Path) -> None:
        os.mkfifo(path)
        with pytest.raises(DamagedCheckpointError, match=r"^.*step-00000100\.pt is no checkpoint of halfstep, but a pipe\.$"):
            verify(path)

    def test_a_device_is_not_read(self) -> None:
        with pytest.raises(DamagedCheckpointError, match=r"^/dev/zero is no checkpoint of halfstep, but a device\.$"):
            verify(Path("/dev/zero"))

    def test_what_may_not_be_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        samples.sealed(path)

        def refuse(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)  # For root, everything may be read.
        with pytest.raises(CheckpointError, match=r"^Cannot read .*step-00000100\.pt: Permission denied\.$"):
            verify(path)

    def test_a_disk_that_fails(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> list[int]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(verification, "checksums", fail)
        with pytest.raises(CheckpointError, match=r"^Cannot read .*step-00000100\.pt: Input/output error\.$"):
            verify(samples.sealed(path))


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_changes_while_it_is_read_is_no_whole_one(path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    samples.sealed(path)

    def save_another(*arguments: Any) -> list[int]:
        found = checksums(*arguments)
        if replaced:
            samples.sealed(path.with_name("other.pt"), samples.record(step=200)).replace(path)
        else:
            changed(path, data(path, 4), b"\x7f")
            os.utime(path, ns=(0, 0))
        return found

    monkeypatch.setattr("halfstep.archive.verification.checksums", save_another)
    with pytest.raises(DamagedCheckpointError, match=r"damaged: it was replaced or written to while it was read\.$"):
        verify(path)


def test_nothing_in_it_is_executed(path: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    samples.saved(path, hostile=Hostile())
    seal(path, samples.record())
    assert verify(path) == samples.record()
    assert not (tmp_path / "executed").exists()
