"""The index of tensors that are spread over the files of a folder: what it says, and whether that can be true."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from halfstep._torch import SavedExtent, SavedIndex, SavedShape, read_saved_index
from halfstep.errors import CheckpointError, DamagedCheckpointError

__all__ = ["INDEX_FILE", "Box", "Shards", "overlap", "read_index"]

# The name that torch.distributed.checkpoint gives to the index.
INDEX_FILE = ".metadata"

# How it names the files of tensors: by the rank that wrote them, and a number.
_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp", re.ASCII)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A tensor that is spread over files.

    Attributes:
        dtype: Its type.
        size: The shape of the whole.
        parts: Its parts, each with the place where it lies.
    """

    dtype: torch.dtype
    size: torch.Size
    parts: tuple[tuple[Box, SavedExtent], ...]


def read_index(folder: Path) -> dict[str, Shards]:
    """The tensors of a folder by name. Nothing is executed, whatever stands in the index.

    Raises:
        DamagedCheckpointError: The index is missing, is no index of tensors, or speaks of what cannot be there.
        CheckpointError: It cannot be read.

    Example:
        >>> read_index(Path("no/such/folder"))
        Traceback (most recent call last):
        ...
        halfstep.errors.DamagedCheckpointError: no/such/folder is damaged: its file .metadata is missing.
    """
    path = folder / INDEX_FILE
    try:
        index = read_saved_index(path.read_bytes())
        _check_shapes(index)
        _check_files(index, folder=folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{folder} is damaged: its file {INDEX_FILE} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    return {name: _shards(name, shape, index.extents) for name, shape in index.shapes.items()}


def overlap(one: Box, other: Box) -> Box | None:
    """What two parts of a tensor have in common; `None` where that is nothing.

    Example:
        >>> overlap(Box(offsets=(0, 2), sizes=(2, 3)), Box(offsets=(1, 0), sizes=(4, 4)))
        Box(offsets=(1, 2), sizes=(1, 2))
    """
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets=offsets, sizes=sizes) if all(size > 0 for size in sizes) else None


def _shards(name: str, shape: SavedShape, extents: Mapping[tuple[str, tuple[int, ...]], SavedExtent]) -> Shards:
    parts = tuple((Box(offsets=offsets, sizes=sizes), extents[name, offsets]) for offsets, sizes in shape.chunks)
    return Shards(dtype=shape.dtype, size=torch.Size(shape.size), parts=parts)


def _check_shapes(index: SavedIndex) -> None:
    """Whether each tensor consists of its parts, and each of those has its place."""
    places = set(index.extents)
    for name, shape in index.shapes.items():
        for offsets, sizes in shape.chunks:
            if not _is_within(offsets, sizes, size=shape.size):
                raise ValueError(f"a part of {name} lies outside of it")
            if (name, offsets) not in places:
                raise ValueError(f"a part of {name} has no place in a file, or two parts have the same")
            places.remove((name, offsets))
        if sum(math.prod(sizes) for _, sizes in shape.chunks) != math.prod(shape.size):
            raise ValueError(f"the parts of {name} do not make up all of it")
    if places:
        raise ValueError(f"it knows a place for a part of {min(places)[0]} that does not exist")


def _is_within(offsets: tuple[int, ...], sizes: tuple[int, ...], *, size: tuple[int, ...]) -> bool:
    return len(offsets) == len(sizes) == len(size) and all(a + m <= n for a, m, n in zip(offsets, sizes, size, strict=True))


def _check_files(index: SavedIndex, *, folder: Path) -> None:
    """Whether the places lie side by side in files that are there."""
    by_file: defaultdict[str, list[SavedExtent]] = defaultdict(list)
    for extent in index.extents.values():
        by_file[extent.file].append(extent)
    for file, extents in by_file.items():
        if not _FILE.fullmatch(file):
            raise ValueError(f"it names {file!r}, which is no file of tensors")
        try:
            size = (folder / file).stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{folder} is damaged: its file {file} is missing.") from error
        _check_extents(file, extents, size=size)


def _check_extents(file: str, extents: Iterable[SavedExtent], *, size: int) -> None:
    end = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset < end:
            raise ValueError(f"two tensors lie in the same place of {file}")
        end = extent.offset + extent.length
    if end > size:
        raise ValueError(f"a tensor lies beyond the end of {file}, or that file is cut short")
