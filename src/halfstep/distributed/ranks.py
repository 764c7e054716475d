"""The ranks that train one model together, and what they agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.kinds import data_parallel_modules, dtensor_type, fully_sharded_modules, wrapped_by_first_fsdp
from halfstep.errors import ConfigurationError, InvalidTypeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "all_reduce_", "ranks_of", "reduced_by", "replicated_parameters"]


@final
class Ranks:
    """The ranks that train one model together. Made by `ranks_of`.

    Every method is a collective operation: all ranks call it, in the same order.

    Attributes:
        rank: The position of this process among them, from 0.
        size: How many they are, 2 or more.

    Example:
        >>> import torch
        >>> ranks = ranks_of(torch.nn.Linear(2, 2))
        >>> "alone" if ranks is None else f"{ranks.rank} of {ranks.size}"
        'alone'
    """

    def __init__(self, *, groups: Sequence[ProcessGroup], members: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._members = tuple(members)
        self.rank = self._members.index(dist.get_rank())
        self.size = len(self._members)

    @property
    def process_group(self) -> ProcessGroup:
        """The one group that they form.

        Raises:
            ConfigurationError: They are a part of the processes, and form no single group.
        """
        if len(self._groups) == 1 and dist.get_world_size(self._groups[0]) == self.size:
            return self._groups[0]
        if self.size == dist.get_world_size():
            group: Any = dist.group.WORLD
            return group  # type: ignore[no-any-return]
        raise ConfigurationError(
            f"The {self.size} ranks that train together are some of {dist.get_world_size()} and form no process group of their own. Make "
            "one with torch.distributed.new_group, and pass it as MixedPrecision(process_group=...)."
        )

    def maximize_(self, values: Tensor) -> None:
        """Replaces each element by its maximum over all ranks, in place. The host does not wait for the result.

        Args:
            values: A plain tensor of the same shape and type on all ranks, on any device. What becomes of a NaN is up to the backend.
        """
        # A maximum over the rows of a grid and then over its columns is one over the whole grid.
        for group in self._groups:
            all_reduce_(values, group=group, op=dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order.

        Args:
            value: Anything that can be pickled. It may differ in type and size from rank to rank.
        """
        found = {dist.get_rank(): value}
        for group in self._groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group=group)
            for part in parts:
                found.update(part)
        return [found[member] for member in self._members if member in found]


def ranks_of(model: nn.Module, *, process_group: ProcessGroup | None = None) -> Ranks | None:
    """The ranks that train a model together; `None` when this process trains it alone.

    Args:
        model: A model in `DistributedDataParallel`, under `fully_shard`, or with parameters that are DTensors, in any mixture and in any
            submodule. Parameters that `fully_shard` holds gathered after a forward pass are sharded again.
        process_group: The ranks to use in place of those that the model tells, for parallelism that it does not show, such as pipelines.

    Raises:
        ConfigurationError: The model is wrapped in `FullyShardedDataParallel`, or this process is no member of the group.
        InvalidTypeError: `process_group` is no process group.

    Example:
        >>> import torch
        >>> ranks_of(torch.nn.Linear(2, 2)) is None
        True
    """
    if wrapped_by_first_fsdp(model):
        raise ConfigurationError(
            f"The model {type(model).__name__} is wrapped in FullyShardedDataParallel, whose gradients halfstep cannot treat rightly. "
            "Use torch.distributed.fsdp.fully_shard(model) instead."
        )
    if not dist.is_available() or not dist.is_initialized():
        return None
    if process_group is not None:
        _check_group(process_group)
        return _ranks([process_group], members=dist.get_process_group_ranks(process_group))
    meshes = _meshes(model)
    data_parallel = [module.process_group for module in data_parallel_modules(model)]
    groups = list(dict.fromkeys([*data_parallel, *(group for mesh in meshes for group in mesh.get_all_groups())]))
    if len(groups) == 1:
        return _ranks(groups, members=dist.get_process_group_ranks(groups[0]))
    if len(meshes) == 1 and not data_parallel:
        return _ranks(groups, members=meshes[0].mesh.flatten().tolist())
    return _ranks(groups, members=range(dist.get_world_size()))


def replicated_parameters(model: nn.Module, *, ranks: Ranks) -> frozenset[int]:
    """The identities of the parameters whose gradients `DistributedDataParallel` reduces over all ranks: they are the same on each."""
    return frozenset(
        id(parameter)
        for module in data_parallel_modules(model)
        if dist.get_world_size(module.process_group) == ranks.size
        for parameter in reduced_by(module)
    )


def reduced_by(module: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters whose gradients a module reduces."""
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in module.parameters_to_ignore:
            yield parameter


def all_reduce_(values: Tensor, *, group: ProcessGroup, op: Any) -> None:
    """Reduces a tensor over a group, in place, wherever it lies: it is moved over and back where the group does not serve its device.

    Args:
        values: A plain tensor.
        group: The group.
        op: One of `torch.distributed.ReduceOp`.
    """
    served = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if values.device.type in served and values.is_contiguous():
        dist.all_reduce(values, op=op, group=group)
        return
    device = values.device if values.device.type in served else _reachable(served)
    moved = values.to(device).contiguous()
    dist.all_reduce(moved, op=op, group=group)
    values.copy_(moved)


def _reachable(served: Sequence[str]) -> torch.device:
    """The device of this process that a group with these device types takes tensors from."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None and accelerator.type in served else torch.device(served[0])


def _check_group(group: object) -> None:
    if group == dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
        raise ConfigurationError(
            f"Rank {dist.get_rank()} is no member of the process group that it was given. Pass the group that this rank trains in, or "
            "leave process_group out."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidTypeError(f"process_group takes a torch.distributed.ProcessGroup or None, not a {type(group).__name__}.")


def _ranks(groups: Sequence[ProcessGroup], *, members: Sequence[int]) -> Ranks | None:
    shared = [group for group in groups if dist.get_world_size(group) > 1]
    return Ranks(groups=shared, members=members) if shared else None


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    for module in fully_sharded_modules(model):
        module.reshard()  # after a forward pass the parameters may be whole, and then they show no mesh
    kind = dtensor_type()
    if kind is None:
        return []
    return list(dict.fromkeys(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, kind)))
