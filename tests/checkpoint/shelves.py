"""Folders of checkpoints, and ways in which one goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["damage", "failing", "names", "of_step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def of_step(*steps: int) -> list[str]:
    return [f"step-{step:08d}.pt" for step in steps]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Callable[[], None]:
    """Has the next checkpoint fail when some of it was written; returns what ends that."""
    save = torch.save

    def fail(tree: Any, file: Any) -> None:
        if isinstance(file, BytesIO):  # tried out in memory
            save(tree, file)
            return
        file.write(b"PK" * 100)
        raise error

    monkeypatch.setattr(torch, "save", fail)
    return lambda: monkeypatch.setattr(torch, "save", save)
