"""Whatever happens to a file: it is refused, and with no other error."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.archive import inspect_path, read_record, verify
from halfstep.errors import DamagedCheckpointError
from tests.archive import damage, samples


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.sealed(tmp_path_factory.mktemp("damage") / "step-00000100.pt")


@pytest.fixture(scope="module")
def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _mended(path: Path, content: bytes) -> Iterator[None]:
    yield
    put(path, content)


def put(path: Path, content: bytes) -> None:
    """Writes in place: some file systems flush a file that was emptied first."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def refused(path: Path, content: bytes) -> str:
    """The error of a file with that content."""
    put(path, content)
    with pytest.raises(DamagedCheckpointError) as caught:
        verify(path)
    return str(caught.value)


def test_what_is_not_damaged_is_not_refused(path: Path) -> None:
    assert verify(path) == samples.record()


def test_no_byte_can_be_another(path: Path, content: bytes) -> None:
    spans = samples.frame(content)
    chance = random.Random(0)
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])]), place)
            with pytest.raises(DamagedCheckpointError, match=r"^.*step-00000100\.pt is "):
                verify(path)
            if not any(begin <= place < end for begin, end in spans):
                with pytest.raises(DamagedCheckpointError):
                    read_record(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert verify(path) == samples.record()


def test_no_length_can_be_another(path: Path, content: bytes) -> None:
    put(path, content)
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        what = r"cut short: it has no end record" if length else r"damaged: it is empty"
        with pytest.raises(DamagedCheckpointError, match=rf"^.*step-00000100\.pt is {what}\.$"):
            verify(path)


def test_a_thousand_damaged_files_are_refused(path: Path, content: bytes) -> None:
    ways: Counter[str] = Counter()
    for way, changed in damage.variants(content, count=1000, seed=20260131):
        error = refused(path, changed)
        assert error.startswith(f"{path} is "), (way, error)
        assert error.isprintable(), (way, error)
        ways[way] += 1
    assert sum(ways.values()) == 1000
    assert set(ways) == {way.__name__ for way in damage.WAYS}
    assert ways["flip"] >= 500


def test_two_files_cannot_be_mixed(path: Path, content: bytes, tmp_path: Path) -> None:
    other = samples.sealed(tmp_path / "other.pt", samples.record(step=200)).read_bytes()
    assert len(other) == len(content)
    places = [place for place in range(len(content)) if content[place] != other[place]]
    for place in range(places[0] + 1, places[-1]):
        refused(path, content[:place] + other[place:])


@given(content=st.binary(max_size=200) | st.binary(max_size=100).map(lambda more: b"PK\x03\x04" + more))
def test_no_content_raises_anything_else(path: Path, content: bytes) -> None:
    put(path, content)
    for check in (verify, read_record):
        with pytest.raises(DamagedCheckpointError):
            check(path)
    assert inspect_path(path).checkpoint is None


@settings(max_examples=300)
@given(data=st.data())
def test_no_bytes_anywhere_raise_anything_else(path: Path, content: bytes, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(content)) | st.integers(content.index(b"PK\x01\x02"), len(content)))
    end = data.draw(st.integers(begin, min(begin + 40, len(content))))
    changed = content[:begin] + data.draw(st.binary(max_size=40)) + content[end:]
    put(path, changed)
    if changed != content:
        with pytest.raises(DamagedCheckpointError):
            verify(path)


@settings(max_examples=300)
@given(data=st.data())
def test_no_resealed_bytes_raise_anything_else(path: Path, content: bytes, data: st.DataObject) -> None:
    """Bytes around the data that make sense, or almost, and a digest that is right wherever Python can tell what the frame is."""
    begin = data.draw(st.integers(content.index(b"PK\x01\x02"), len(content) - 80))
    number = data.draw(st.sampled_from([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF]) | st.integers(0, 0xFFFFFFFF))
    width = data.draw(st.sampled_from([1, 2, 4]))
    changed = content[:begin] + number.to_bytes(4, "little")[:width] + content[begin + width :]
    try:
        changed = samples.resealed(changed)
    except Exception:  # Whatever zipfile makes of it.
        changed = content[:begin] + changed[begin:]
    put(path, changed)
    with suppress(DamagedCheckpointError):
        verify(path)
