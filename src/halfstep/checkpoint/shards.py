"""The tensors of a checkpoint that are spread over ranks, as `torch.distributed.checkpoint` stores them in a folder.

That package takes most of a second to import, and a process that trains alone needs it only to write such a folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.archive.checksums import checksums
from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.checkpoint.shard_index import INDEX_FILE, read_index
from halfstep.checkpoint.shard_reading import fill
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records.checkpoint import FileRecord

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["read_shards", "shard_shapes", "write_shards"]


def write_shards(tensors: Mapping[str, Tensor], folder: Path, *, group: ProcessGroup | None) -> tuple[FileRecord, ...]:
    """Writes tensors into a folder, each rank what lies on it, and flushes the files to disk.

    A collective operation of the group. Of what several ranks hold, such as a plain tensor, one of them writes it. Where anything fails on
    one rank, all raise; what was written until then stays in the folder.

    Args:
        tensors: By name, the same names on all ranks. DTensors in any placements but `Partial`, whose meshes lie within the group, and
            plain tensors that are the same on all ranks.
        folder: The folder. It exists, all ranks see it, and nothing was written into it before.
        group: The ranks that write, over gloo or nccl; `None` for this process alone.

    Returns:
        On every rank the stretches of all files: each part of a tensor with that tensor's name, and the index without one.

    Raises:
        CheckpointError: A rank could not write, a tensor does not lie within the group as a whole, or this build of torch has no
            `torch.distributed`. The message says why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = write_shards({"model.weight": torch.ones(2, 3)}, Path(folder), group=None)
        ...     [(each.file, each.offset, each.name) for each in files]
        [('__0_0.distcp', 0, 'model.weight'), ('.metadata', 0, '')]
    """
    if not dist.is_available():
        raise CheckpointError(f"{folder} could not be written: this build of torch has no torch.distributed.")
    writing = _Writing(tensors, folder, rank=0 if group is None else dist.get_rank(group))
    failure = f"{folder} could not be written"
    plans = on_all_ranks(writing.plan, group=group, failure=failure)
    written = on_all_ranks(lambda: writing.write(plans), group=group, failure=failure)
    indices = on_all_ranks(lambda: writing.finish([results for results, _ in written]), group=group, failure=failure)
    return tuple(record for records in (*(records for _, records in written), *indices) for record in records)


def shard_shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """The types and whole shapes of the tensors in a folder, by name. Nothing is executed, whatever the files hold.

    Raises:
        DamagedCheckpointError: The index or a file that it names is missing, or it is no index of tensors, or says what cannot be.
        CheckpointError: It cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_shards({"model.weight": torch.ones(2, 3)}, Path(folder), group=None)
        ...     shard_shapes(Path(folder))
        {'model.weight': (torch.float32, torch.Size([2, 3]))}
    """
    return {name: (shards.dtype, shards.size) for name, shards in read_index(folder).items()}


def read_shards(targets: Mapping[str, Tensor], folder: Path, *, group: ProcessGroup | None) -> None:
    """Fills tensors, in place, with what a folder holds, each rank what lies on it; on any number of ranks, however many wrote.

    A collective operation of the group. Where anything fails on one rank, all raise; the targets may be filled in part then. Nothing is
    executed, whatever the files hold. Their checksums are not looked at: verify them before.

    Args:
        targets: By name: plain tensors and DTensors in any placements but `Partial`, on any device, of the type and whole shape that was
            written. They may be fewer than the folder holds, and need not be contiguous.
        folder: The folder.
        group: The ranks that read; `None` for this process alone, which needs no process group.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        CheckpointError: A tensor is not in the folder or has another shape or type there, or a file cannot be read.

    Example:
        >>> import tempfile
        >>> target = torch.zeros(3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_shards({"weight": torch.arange(3.0)}, Path(folder), group=None)
        ...     read_shards({"weight": target}, Path(folder), group=None)
        >>> target
        tensor([0., 1., 2.])
    """
    on_all_ranks(lambda: fill(targets, folder), group=group, failure=f"{folder} could not be loaded")


@final
class _Writing:
    """One rank's part in writing a folder, in three steps; between them the ranks tell each other what came of it."""

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, *, rank: int) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415 - slow to import

        self._tensors = tensors
        self._folder = folder
        self._rank = rank
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._writer = _writer(folder)
        self._metadata: Any = None

    def plan(self) -> SavePlan:
        """What this rank has to write."""
        for name, tensor in self._tensors.items():
            if tensor.layout is not torch.strided:
                raise CheckpointError(f"{name} is a tensor with the layout {tensor.layout}, which cannot be stored in parts")
        first = self._rank == 0
        detached = {name: tensor.detach() for name, tensor in self._tensors.items()}
        self._planner.set_up_planner(detached, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plans: Sequence[SavePlan]) -> tuple[list[Any], list[FileRecord]]:
        """Writes this rank's share of what all have, and returns torch's own results beside the stretches of its files."""
        shares, self._metadata = self._planner.create_global_plan([*plans])
        share = self._planner.finish_plan(self._writer.prepare_global_plan(shares)[self._rank])
        results = self._writer.write_data(share, self._planner).wait()
        by_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for result in results:
            place = result.storage_data
            by_file[place.relative_path].append((place.offset, place.length, result.index.fqn))
        files = sorted(self._folder.glob(f"__{self._rank}_*.distcp"))
        return results, [record for path in files for record in _stretches(path, by_file[path.name])]

    def finish(self, results: list[list[Any]]) -> list[FileRecord]:
        """Writes the index, on the first rank, and makes sure that it can be read again."""
        if self._rank > 0:
            return []
        self._writer.finish(self._metadata, results)
        try:
            read_index(self._folder)
        except DamagedCheckpointError as error:
            raise CheckpointError(str(error)) from error
        return _stretches(self._folder / INDEX_FILE, [])


def _writer(folder: Path) -> FileSystemWriter:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415 - slow to import
    from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            """Nothing: torch would note the path, which is not that of the checkpoint yet."""
            return StorageMeta()

    return Writer(folder, sync_files=True, thread_count=1, overwrite=False)


def _stretches(path: Path, items: Sequence[tuple[int, int, str]]) -> list[FileRecord]:
    """The stretches that make up a file: those given by offset, length and name, and those between them, without a name."""
    size, end = path.stat().st_size, 0
    spans: list[tuple[int, int, str]] = []
    for offset, length, name in (*sorted(items), (size, 0, "")):
        if offset > end:
            spans.append((end, offset - end, ""))
        if length:
            spans.append((offset, length, name))
        end = offset + length
    spans = spans or [(0, 0, "")]  # the file of a rank that has nothing to write
    sums = checksums(path, [(offset, length) for offset, length, _ in spans])
    return [
        FileRecord(file=path.name, offset=offset, length=length, crc32=crc32, name=name)
        for (offset, length, name), crc32 in zip(spans, sums, strict=True)
    ]
