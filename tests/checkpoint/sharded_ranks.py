"""What runs on each rank, for tests of tensors that are spread over ranks."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from halfstep.checkpoint.shards import read_shards, write_shards
from halfstep.errors import HalfstepError
from halfstep.records.checkpoint import FileRecord

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


class Net(nn.Module):
    """With parameters that no number of ranks divides, one of a single element, one without any, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 3)
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.zeros(0, 2))
        self.frozen = nn.Linear(3, 7).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.first(x) * self.one) + self.none.sum()
        return result


def plain() -> dict[str, Tensor]:
    """Tensors that are the same on every rank: of each type, without a dimension, without elements, and not contiguous."""
    numbers = torch.Generator().manual_seed(2)
    made = {f"plain.{str(dtype).split('.')[1]}": (torch.randn(3, 4, generator=numbers) * 9).to(dtype) for dtype in DTYPES}
    made["plain.step"] = torch.tensor(7.0)
    made["plain.count"] = torch.tensor(2**40)
    made["plain.empty"] = torch.zeros(0, 3)
    made["plain.transposed"] = torch.randn(4, 6, generator=numbers).t()
    made["plain.slice"] = torch.randn(8, 8, generator=numbers)[1:7:2, 3:5]
    made["plain.expanded"] = torch.randn(3, 1, generator=numbers).expand(3, 5)
    made["plain.conjugate"] = torch.randn(3, dtype=torch.complex64, generator=numbers).conj()
    return made


def spread() -> dict[str, DTensor]:
    """DTensors of each type: sharded evenly or not, in either dimension, and replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.Generator().manual_seed(3)
    made = {}
    for dtype in DTYPES:
        for dimension in (0, 1):
            whole = (torch.randn(3, 5, generator=numbers) * 9).to(dtype)
            made[f"spread.{str(dtype).split('.')[1]}.{dimension}"] = distribute_tensor(whole, mesh, [Shard(dimension)])
    made["spread.replicated"] = distribute_tensor(torch.randn(4, 2, generator=numbers), mesh, [Replicate()])
    made["spread.step"] = distribute_tensor(torch.tensor(5.0), mesh, [Replicate()])
    return made


def model() -> dict[str, Tensor]:
    net = Net()
    fully_shard(net.first)
    fully_shard(net)
    return {f"model.{name}": parameter for name, parameter in net.named_parameters()}


def everything() -> dict[str, Tensor]:
    return {**plain(), **spread(), **model()}


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each as a plain tensor in which nothing is shared or left over."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().resolve_conj().clone() for name, each in tensors.items()
    }


def emptied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same kinds, filled with something else."""
    with torch.no_grad():
        for name, each in tensors.items():
            local = each.to_local() if isinstance(each, DTensor) else each
            if name == "plain.expanded":
                tensors = {**tensors, name: torch.zeros(3, 5)}
            else:
                local.fill_(1)
    return {**tensors}


def write(rank: int, folder: Path) -> tuple[tuple[FileRecord, ...], dict[str, Tensor]]:
    made = everything()
    return write_shards(made, folder, group=dist.group.WORLD), wholes(made)


def read(rank: int, folder: Path) -> dict[str, Tensor]:
    targets = emptied(everything())
    read_shards(targets, folder, group=dist.group.WORLD)
    return wholes(targets)


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except (HalfstepError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """The file of this rank leads to a device that is always full."""
    (folder / f"__{dist.get_rank()}_0.distcp").symlink_to("/dev/full")
    yield


@contextmanager
def limited_file(folder: Path) -> Iterator[None]:
    """Files may have a size that is reached in the middle of a tensor."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def folder_in_the_way(folder: Path) -> Iterator[None]:
    """Where this rank would write its file there is a folder."""
    (folder / f"__{dist.get_rank()}_0.distcp").mkdir()
    yield


@contextmanager
def failing(folder: Path, error: BaseException) -> Iterator[None]:
    """Something raises while this rank writes its tensors."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", fail)
        yield


FAILURES: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "OSError: [Errno 28] No space left on device": full_disk,
    "OSError: [Errno 27] File too large": limited_file,
    "IsADirectoryError: [Errno 21] Is a directory": folder_in_the_way,
    "UnpicklableError: no": partial(failing, error=UnpicklableError("no\nmore")),
    "MemoryError": partial(failing, error=MemoryError()),
    "KeyboardInterrupt": partial(failing, error=KeyboardInterrupt()),
}
if not Path("/dev/full").exists():
    del FAILURES["OSError: [Errno 28] No space left on device"]


def failures(rank: int, folder: Path) -> dict[tuple[str, int], str]:
    """Each failure on either rank: what is raised on this one."""
    tensors = {**spread(), "large": distribute_tensor(torch.ones(100_000), init_device_mesh("cpu", (2,)), [Shard(0)])}
    found = {}
    for number, (name, failure) in enumerate(FAILURES.items()):
        for guilty in (0, 1):
            own = folder / f"{number}-{guilty}"
            own.mkdir(exist_ok=True)
            with failure(own) if rank == guilty else nullcontext():
                found[name, guilty] = message(partial(write_shards, tensors, own, group=dist.group.WORLD))
    return found


def reading_failures(rank: int, folder: Path, others: Sequence[Path]) -> dict[tuple[Path, int], str]:
    """In turn, either rank reads one of some other folders: what is raised on this one."""
    write(rank, folder)
    return {(other, guilty): message(partial(read, rank, other if rank == guilty else folder)) for other in others for guilty in (0, 1)}


def misuse(rank: int, folder: Path) -> dict[str, str]:
    """What is raised on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    unfinished = {"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    sharded = {"x": distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])}
    for name in ("index", "sum", "alone"):
        (folder / name).mkdir(exist_ok=True)
    if rank == 0:
        (folder / "index" / ".metadata.tmp").mkdir()
    found = {
        "index": message(partial(write_shards, sharded, folder / "index", group=dist.group.WORLD)),
        "write sum": message(partial(write_shards, unfinished, folder / "sum", group=dist.group.WORLD)),
    }
    write_shards({"sum": torch.ones(2)}, folder / "sum", group=dist.group.WORLD)
    found["twice"] = message(partial(write_shards, {"sum": torch.ones(2)}, folder / "sum", group=dist.group.WORLD))
    found["read sum"] = message(partial(read_shards, unfinished, folder / "sum", group=dist.group.WORLD))
    found["alone"] = message(partial(write_shards, sharded, folder / "alone", group=None)) if rank == 0 else ""
    return found


def subgroups(rank: int, folder: Path) -> dict[str, Tensor]:
    """Two groups of four ranks write a folder each, and read that of the other group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "member"))
    mine = rank // 2
    group = mesh.get_group("member")
    whole = torch.arange(7.0) + 10 * mine
    write_shards({"x": distribute_tensor(whole, mesh["member"], [Shard(0)])}, folder / str(mine), group=group)
    dist.barrier()
    target = distribute_tensor(torch.zeros(7), mesh["member"], [Shard(0)])
    read_shards({"x": target}, folder / str(1 - mine), group=group)
    grid = distribute_tensor(torch.zeros(7), mesh, [Replicate(), Shard(0)])
    read_shards({"x": grid}, folder / "0", group=dist.group.WORLD)
    return {"theirs": target.full_tensor(), "first": grid.full_tensor()}


def two_dimensions(rank: int, folder: Path) -> list[bool]:
    """A tensor cut along both dimensions by four ranks, read cut in other ways."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).view(5, 7)
    write_shards({"x": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}, folder, group=dist.group.WORLD)
    found = []
    for placements in ([Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        target = distribute_tensor(torch.zeros(5, 7), mesh, placements)
        read_shards({"x": target}, folder, group=dist.group.WORLD)
        found.append(torch.equal(target.full_tensor(), whole))
    return found


def part_of_the_ranks(rank: int, folder: Path) -> list[list[float]]:
    """A tensor on the first two of three ranks, in a folder that all three write and read: what lies on this one afterwards."""
    tensor = distribute_tensor(torch.arange(5.0), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    write_shards({"x": tensor, "y": torch.ones(2)}, folder, group=dist.group.WORLD)
    targets = {"x": tensor, "y": torch.zeros(2)}
    with torch.no_grad():
        tensor.to_local().zero_()
    read_shards(targets, folder, group=dist.group.WORLD)
    return [tensor.to_local().tolist(), targets["y"].tolist()]
