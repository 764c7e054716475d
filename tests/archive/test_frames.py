"""Where everything lies in an archive, and archives in which it cannot lie so."""

from __future__ import annotations

import hashlib
import struct
from io import FileIO
from pathlib import Path

import pytest

from halfstep.archive.frames import Frame, frame_digest, read_frame
from halfstep.errors import DamagedCheckpointError
from tests.archive import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.sealed(tmp_path / "step-00000100.pt")


def read(path: Path, *, sealed: bool = True) -> Frame:
    with FileIO(path) as file:
        return read_frame(file, path, sealed=sealed)


class TestWhatLiesWhere:
    def test_records_lie_where_python_finds_them(self, path: Path) -> None:
        frame, content = read(path), path.read_bytes()
        spans = [(payload.offset, payload.end) for payload in frame.payloads if payload is not frame.manifest]
        assert spans == samples.frame(content)
        assert [payload.name for payload in frame.payloads][-1] == "halfstep.json"
        assert (frame.prefix, frame.size) == ("archive/", len(content))
        assert content[frame.directory :].startswith(b"PK\x01\x02")

    def test_every_byte_is_of_a_record_or_of_the_frame_or_a_digit(self, path: Path) -> None:
        frame, content = read(path), path.read_bytes()
        owners = [0] * len(content)
        spans = [(payload.offset, payload.end) for payload in frame.payloads if payload is not frame.manifest]
        for begin, end in [*frame.gaps(), *spans, (len(content) - 64, len(content))]:
            for place in range(begin, end):
                owners[place] += 1
        assert set(owners) == {1}

    def test_its_digest_is_that_of_the_gaps(self, path: Path) -> None:
        frame, content = read(path), path.read_bytes()
        with FileIO(path) as file:
            assert frame_digest(file, path, frame) == samples.digest(content) == content[-64:].decode()
        assert hashlib.sha256(b"".join(content[begin:end] for begin, end in frame.gaps())).hexdigest() == samples.digest(content)

    def test_before_it_is_sealed_it_has_no_comment_and_no_manifest(self, path: Path) -> None:
        with pytest.raises(DamagedCheckpointError, match="has no end record"):
            read(path, sealed=False)
        frame = read(samples.saved(path), sealed=False)
        assert frame.manifest is None
        assert {payload.crc32 for payload in frame.payloads} == {0}
        with pytest.raises(DamagedCheckpointError, match="has no end record"):
            read(path)


class TestWhatCannotBe:
    """Tables of contents and headers that agree with each other, so that only what they say together is wrong."""

    def test_data_over_the_table_of_contents(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        header = content.index(b"archive/.data/serialization_id") - 30
        # What lies between a header and the data is as long as the header says.
        struct.pack_into("<H", content, header + 28, read(path).directory - header)
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"the header of its record \.data/serialization_id is not what was saved"):
            read(path)

    def test_two_records_of_one_name(self, path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"archive/data/0", b"archive/data/2"))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read(path)

    @pytest.mark.parametrize("name", [b"archive/data//", b"archive/data/\0", b"elsewhere/data", b"archive/data/\xff"])
    def test_names_that_torch_does_not_give(self, path: Path, name: bytes) -> None:
        path.write_bytes(path.read_bytes().replace(b"archive/data/0", name))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read(path)

    def test_records_without_a_folder(self, path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"archive/", b"archive-"))
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read(path)

    def test_a_record_that_is_compressed(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        line = content.rindex(b"archive/data/0") - 46
        header = content.index(b"archive/data/0") - 30
        struct.pack_into("<H", content, line + 10, 8)
        struct.pack_into("<H", content, header + 8, 8)
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"its table of contents is not what was saved"):
            read(path)

    def test_a_record_that_only_its_header_says_is_compressed(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into("<H", content, content.index(b"archive/data/0") - 30 + 8, 8)
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"the header of its record data/0 is not what was saved"):
            read(path)
