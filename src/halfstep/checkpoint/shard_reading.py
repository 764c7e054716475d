"""Filling tensors with what lies in the files of a folder."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from halfstep._torch import SavedExtent
from halfstep.checkpoint.shard_index import Box, Shards, overlap, read_index
from halfstep.distributed.kinds import dtensor_type, local_tensor
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.numerics.ranges import dtype_name

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["fill"]


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], folder: Path) -> None:
    """Fills what lies on this rank of each target, in place, with what a folder holds under the same name.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        CheckpointError: A tensor is not in the folder or has another shape or type there, or a file cannot be read.
    """
    index = read_index(folder)
    for name, target in targets.items():
        _check_fit(name, target, index.get(name), folder=folder)
    by_file: defaultdict[str, list[_Piece]] = defaultdict(list)
    for name, target in targets.items():
        for piece in _pieces(name, target, index[name]):
            by_file[piece.extent.file].append(piece)
    for file, pieces in by_file.items():
        path = folder / file
        try:
            with path.open("rb") as stream:
                for piece in sorted(pieces, key=lambda piece: piece.extent.offset):
                    piece.fill(stream, path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What a target on this rank and a part of a saved tensor have in common."""

    name: str
    dtype: torch.dtype
    box: Box
    extent: SavedExtent
    common: Box
    target: Tensor
    """The whole of what lies on this rank."""
    begin: tuple[int, ...]
    """Where that begins in the tensor."""

    def fill(self, stream: io.BufferedReader, path: Path) -> None:
        """Copies it from a file into the target."""
        try:
            window: Any = _Window(stream, self.extent)  # torch.load is typed for files that can be written to as well
            part = torch.load(window, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch.load fails in many ways
            raise self._damage(path) from error
        if type(part) is not Tensor or (part.layout, part.dtype, part.shape) != (torch.strided, self.dtype, self.box.sizes):
            raise self._damage(path)
        target = self.target
        for dimension, (offset, size) in enumerate(zip(self.common.offsets, self.common.sizes, strict=True)):
            part = part.narrow(dimension, offset - self.box.offsets[dimension], size)
            target = target.narrow(dimension, offset - self.begin[dimension], size)
        target.copy_(part)

    def _damage(self, path: Path) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{path} is damaged: the data of {self.name} is not what was saved.")


def _pieces(name: str, target: Tensor, shards: Shards) -> Iterator[_Piece]:
    for own in _boxes(target):
        for box, extent in shards.parts:
            common = overlap(own, box)
            if common is not None:
                local = local_tensor(target).detach()
                yield _Piece(name=name, dtype=shards.dtype, box=box, extent=extent, common=common, target=local, begin=own.offsets)


def _boxes(target: Tensor) -> list[Box]:
    """Which part of a tensor lies on this rank; none where its mesh leaves this rank out."""
    kind = dtensor_type()
    if kind is None or not isinstance(target, kind):
        return [Box(offsets=(0,) * target.dim(), sizes=tuple(target.shape))]
    if target.device_mesh.get_coordinate() is None:
        return []
    # DTensor's answer to torch.distributed.checkpoint, whose public functions give it only together with a plan.
    chunks: list[Any] = target.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [Box(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes)) for chunk in chunks]


def _check_fit(name: str, target: Tensor, shards: Shards | None, *, folder: Path) -> None:
    if shards is None:
        raise CheckpointError(f"{name} is not in {folder}.")
    if shards.size != target.shape:
        raise CheckpointError(f"{name} has the shape {list(target.shape)}, and {list(shards.size)} in {folder}.")
    if shards.dtype is not target.dtype:
        raise CheckpointError(f"{name} is {dtype_name(target.dtype)}, and {dtype_name(shards.dtype)} in {folder}.")


@final
class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, stream: io.BufferedReader, extent: SavedExtent) -> None:
        super().__init__()
        self._stream = stream
        self._extent = extent
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._extent.length}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        left = max(self._extent.length - self._position, 0)
        self._stream.seek(self._extent.offset + self._position)
        count = self._stream.readinto(memoryview(buffer).cast("B")[:left])
        self._position += count
        return count
