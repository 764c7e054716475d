"""A whole tensor of a checkpoint, in the form that a tensor of the run has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep.distributed import dtensor_type

__all__ = ["placed_like", "shard_like"]


def placed_like(own: Any, value: Any) -> Any:
    """A value of a checkpoint, spread over the ranks where it has the shape of a parameter that is; anything else as it is.

    No rank waits for another: each takes its part of the whole.
    """
    kind = dtensor_type()
    if kind is None or not isinstance(own, kind) or not isinstance(value, Tensor) or isinstance(value, kind) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import, and loaded where DTensors are

    return distribute_tensor(value.to(own.device_mesh.device_type), own.device_mesh, own.placements, src_data_rank=None)


def shard_like(own: Any, local: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, as a part of one that is spread as another is; plain where that is plain."""
    kind = dtensor_type()
    if kind is None or not isinstance(own, kind):
        return local
    return kind.from_local(local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
