"""Folders of tensors that were written by one process, and changed afterwards."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.shards import read_shards, write_shards

FILE = "__0_0.distcp"


def made() -> dict[str, Tensor]:
    return {"first": torch.arange(6.0).view(2, 3), "second": torch.arange(6.0) + 10, "third": torch.tensor(3)}


def written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_shards(made(), folder, group=None)
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    targets = {name: torch.full_like(tensor, 77) for name, tensor in made().items()}
    read_shards(targets, folder, group=None)
    return targets


def changed(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes the index, as an object of torch's own classes; the change may also return another object in its place."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    other = change(index)
    path.write_bytes(pickle.dumps(index if other is None else other))


def place_of(name: str, index: Any) -> Any:
    """Where a tensor lies: torch's own object, which can be changed."""
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


def replaced(folder: Path, name: str, data: bytes) -> None:
    """Puts something else in the place of a tensor, so that the index leads to it."""
    path = folder / FILE
    offset = path.stat().st_size
    with path.open("ab") as stream:
        stream.write(data)

    def change(index: Any) -> None:
        place = place_of(name, index)
        place.offset, place.length = offset, len(data)

    changed(folder, change)


class Hostile:
    """When it is unpickled, a command makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)
