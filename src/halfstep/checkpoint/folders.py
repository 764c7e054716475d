"""Several processes write what their run goes on from into one folder, and read it again, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.archive import checksum, part_of, publish, read_folder, read_record, verify, verify_stretches, write_folder_record
from halfstep.archive.folders import FOLDER_FILE
from halfstep.checkpoint.contents import Contents
from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.checkpoint.reading import Loaded, read_tree
from halfstep.checkpoint.shards import read_shards, shard_shapes, write_shards
from halfstep.checkpoint.spreading import counterparts
from halfstep.checkpoint.trees import put_at
from halfstep.checkpoint.writing import clean_up, write_sealed
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.numerics.ranges import dtype_name
from halfstep.records import CheckpointRecord, FileRecord, FolderRecord, PartRecord, TensorRecord

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["read_spread", "write_folder"]


def write_folder(contents: Contents, path: Path, *, rank: int, ranks: int, group: ProcessGroup) -> None:
    """Writes a checkpoint of several processes; a reader sees the one that was there before or the whole new one.

    A collective operation. Where it fails on one rank, all raise, and nothing is left behind.

    Args:
        contents: What this rank has of it.
        path: The folder, on a file system that all ranks share; one that is no checkpoint is not replaced.
        rank: Of this process among those that save together.
        ranks: How many those are.
        group: Theirs, which nobody else uses meanwhile.

    Raises:
        CheckpointError: It cannot be written. What was there before is untouched.
    """
    failure = f"{path} could not be saved"
    part = Path(on_all_ranks(lambda: _begin(path) if rank == 0 else "", group=group, failure=failure)[0])
    with clean_up(part, path) if rank == 0 else nullcontext():
        on_all_ranks(lambda: _check_shared(part), group=group, failure=failure)
        files = write_shards(contents.spread, part, group=group)
        own = on_all_ranks(lambda: _write_own(contents, part, rank=rank, ranks=ranks), group=group, failure=failure)
        if rank == 0:
            files = (*files, *(each for _, each in own))
        record = own[0][0]
        on_all_ranks(lambda: _finish(record, files, contents, part, path) if rank == 0 else None, group=group, failure=failure)


def _begin(path: Path) -> str:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and several ranks save a folder. Name another.")
    if path.is_dir() and not (path / FOLDER_FILE).is_file() and any(path.iterdir()):
        raise CheckpointError(f"{path} is a folder that is no checkpoint: it is not replaced. Name one that is not there.")
    part = part_of(path)
    part.mkdir()
    return str(part)


def _check_shared(part: Path) -> None:
    if not part.is_dir():
        raise CheckpointError(f"{part.parent} is not the same folder on all ranks. Save to a file system that all of them share.")


def _write_own(contents: Contents, part: Path, *, rank: int, ranks: int) -> tuple[CheckpointRecord | None, FileRecord]:
    path = part / own_name(rank)
    record = write_sealed(contents, path, ranks=ranks, rank=rank)
    whole = FileRecord(file=path.name, offset=0, length=path.stat().st_size, crc32=checksum(path))
    return (record if rank == 0 else None), whole


def own_name(rank: int) -> str:
    """The name of the file of what a rank saves for itself.

    Example:
        >>> own_name(0)
        'rank-0.pt'
    """
    return f"rank-{rank}.pt"


def _finish(record: CheckpointRecord | None, files: tuple[FileRecord, ...], contents: Contents, part: Path, path: Path) -> None:
    assert record is not None
    write_folder_record(part, FolderRecord(checkpoint=_whole(record, contents.spread, files), files=files))
    publish(part, path)


def _whole(record: CheckpointRecord, spread: Mapping[str, Tensor], files: tuple[FileRecord, ...]) -> CheckpointRecord:
    """What is in all of a folder: what rank 0 saved for itself, and what all ranks saved together."""
    places: dict[str, dict[str, None]] = {}
    for each in files:
        if each.name:
            places.setdefault(each.name, {})[each.file] = None
    tensors = tuple(
        TensorRecord(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            storage=",".join(places.get(name, ())),
        )
        for name, tensor in spread.items()
    )
    parts = []
    for part in record.parts:
        held = [tensor for name, tensor in spread.items() if name.startswith(f"{part.name}.")]
        size = sum(tensor.numel() * tensor.element_size() for tensor in held)
        parts.append(PartRecord(name=part.name, tensors=part.tensors + len(held), bytes=part.bytes + size))
    own = tuple(replace(each, storage=f"{own_name(0)}:{each.storage}") for each in record.tensors)
    return replace(record, parts=tuple(parts), tensors=(*own, *tensors))


def read_spread(path: Path, engines: Mapping[str, MixedPrecision], *, rank: int, ranks: int, group: ProcessGroup | None) -> Loaded:
    """What several processes saved, as much of it as this one needs; a collective operation where there is a group.

    Args:
        path: The folder.
        engines: Those that it is for, by which tensors are spread.
        rank: Of this process.
        ranks: How many load together; they share the work of verifying.
        group: Theirs; `None` for one process.

    Raises:
        DamagedCheckpointError: It is not as it was saved.
        CheckpointError: It cannot be read.
    """
    failure = f"{path} could not be loaded"
    kept: list[Loaded] = []

    def read() -> None:
        read_record(path)  # It knows the sizes of all files, where a rank verifies stretches of some.
        folder = read_folder(path)
        verify_stretches(path, folder.files[rank::ranks])
        then = folder.checkpoint.ranks
        has_own = rank < then
        own = path / own_name(rank if has_own else 0)
        tree = read_tree(own, record=verify(own))
        kept.append(Loaded(path=path, record=folder.checkpoint, tree=tree, is_same=then == ranks, has_own=has_own))

    on_all_ranks(read, group=group, failure=failure) if group is not None else read()
    loaded = kept[0]
    places: Any = loaded.tree.get("spread")
    targets: dict[str, Tensor] = {}

    def prepare() -> None:
        if not isinstance(places, dict):
            raise DamagedCheckpointError(f"{path} is damaged: it does not say where the tensors belong that its ranks saved together.")
        own = counterparts(engines, loaded.tree)
        for name, (dtype, shape) in shard_shapes(path).items():
            if name in places:
                targets[name] = _target(own.get(name), dtype=dtype, shape=shape)
        if missing := [name for name in places if name not in targets]:
            raise DamagedCheckpointError(f"{path} is damaged: {missing[0]} is missing.")

    on_all_ranks(prepare, group=group, failure=failure) if group is not None else prepare()
    read_shards(targets, path, group=group)
    for name, target in targets.items():
        with suppress(LookupError, TypeError):  # What has no place in this process's part is found missing when it is fitted.
            put_at(loaded.tree, tuple(places[name]), target)
    return loaded


def _target(own: Any, *, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Memory for a tensor of a checkpoint, spread as this run's is where they have the same shape."""
    if isinstance(own, Tensor) and own.shape == shape:
        return torch.empty_like(own, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)
