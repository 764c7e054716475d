"""Checksums of stretches of files."""

from __future__ import annotations

import random
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.archive import checksum
from halfstep.archive.checksums import checksums
from halfstep.errors import CheckpointError, DamagedCheckpointError

SIZE = 9 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checksums") / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture(scope="module")
def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, None), (0, 0), (0, 1), (5, None), (SIZE, None), (SIZE, 0), (SIZE + 9, None), (3, 1 << 20), (0, SIZE), (7, (3 << 20) + 1)],
)
def test_of_a_stretch(path: Path, content: bytes, offset: int, length: int | None) -> None:
    assert checksum(path, offset=offset, length=length) == zlib.crc32(content[offset : None if length is None else offset + length])


@given(cuts=st.lists(st.integers(0, SIZE), max_size=12).map(sorted))
def test_of_many_stretches(path: Path, content: bytes, cuts: list[int]) -> None:
    spans = [(begin, end - begin) for begin, end in zip([0, *cuts], [*cuts, SIZE], strict=True)]
    assert checksums(path, spans) == [zlib.crc32(content[offset : offset + length]) for offset, length in spans]


def test_of_none(path: Path) -> None:
    assert checksums(path, []) == []


@pytest.mark.parametrize("spans", [[(SIZE - 4, 5)], [(0, SIZE), (SIZE + 5, 1)], [(0, SIZE - 1), (0, SIZE + 1)]])
def test_a_file_that_ends_too_early_is_cut_short(path: Path, spans: list[tuple[int, int]]) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"file is cut short: it ends 1 bytes? before the end of something in it\.$"):
        checksums(path, spans)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*none\.$"):
        checksum(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*none\.$"):
        checksums(tmp_path / "none", [(0, 5 << 20)])


def test_little_is_read_by_one_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    checksums(path, [(0, 4 << 20)])
    with pytest.raises(AssertionError, match="a thread was started"):
        checksums(path, [(0, (4 << 20) + 1)])
