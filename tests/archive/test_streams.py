"""A file that goes to the disk while it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.archive import streams
from halfstep.archive.streams import EagerStream

MIB = 1024**2


@pytest.mark.parametrize("found", [True, False], ids=["where the system can be asked", "elsewhere"])
def test_what_is_written_is_in_the_file(found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not found:
        monkeypatch.setattr(streams, "_begin_to_write", None)
    tensor = torch.arange(10 * MIB, dtype=torch.float32)
    with (tmp_path / "a.pt").open("xb") as file:
        stream: Any = EagerStream(file)
        torch.save({"a": tensor, "b": tensor[1:]}, stream)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["b"], tensor[1:])


def test_each_part_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ask(_: int, start: int, length: int, __: int) -> int:
        asked.append((start, length))
        return 0

    monkeypatch.setattr(streams, "_begin_to_write", ask)
    with (tmp_path / "a").open("xb") as file:
        stream = EagerStream(file)
        for size in (1, 40, 10, 10, 20, 70):
            assert stream.write(bytes(size * MIB)) == size * MIB
    assert asked == [(0, 41 * MIB), (41 * MIB, 40 * MIB), (81 * MIB, 70 * MIB)]
    assert (tmp_path / "a").stat().st_size == 151 * MIB


def test_that_it_cannot_begin_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_begin_to_write", lambda *_: -1)
    with (tmp_path / "a").open("xb") as file:
        assert EagerStream(file).write(bytes(33 * MIB)) == 33 * MIB


def test_linux_can_be_asked() -> None:
    if sys.platform != "linux":
        pytest.skip("not Linux")
    assert streams._begin_to_write is not None
