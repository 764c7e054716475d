"""The norm of gradients that may be spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep._torch import foreach_multiply_, foreach_norms
from halfstep.distributed.kinds import dtensor_type, local_tensor
from halfstep.distributed.ranks import all_reduce_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["clip_", "total_norm"]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, as if they were one vector; the same number on all ranks.

    Plain gradients alone give exactly what `torch.nn.utils.get_total_norm` does. With DTensors among them it is a collective operation of
    the ranks of their meshes, in which a sharded gradient counts once over all ranks, a replicated one once, and one that is a sum still to
    be made (`Partial`) as the sum. A plain gradient beside DTensors counts once, too; where it differs between the ranks, the mean of its
    squared norms counts, so that the ranks agree nevertheless. Norms are then combined in float64, where their squares do not overflow.

    Args:
        gradients: Tensors of any shapes, in the same order on all ranks. This rank's part of a sharded one may be empty.

    Returns:
        A plain 0-d tensor on the device of the first gradient; float32 with DTensors.

    Example:
        >>> import torch
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    kind = dtensor_type()
    if kind is not None:
        for gradient in gradients:
            if isinstance(gradient, kind):
                return _norm_over_ranks(gradients, kind)
    if _uniform(gradients):
        # What get_total_norm comes down to for such gradients, without its sorting by device and type.
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norms([*gradients])))
            return norm
    return torch.nn.utils.get_total_norm(gradients)


def clip_(gradients: Sequence[Tensor], *, max_norm: float, norm: Tensor) -> None:
    """Scales gradients down, in place, so that their norm is at most a given one: by `min(1, max_norm / (norm + 1e-6))`.

    The result is bit for bit that of `torch.nn.utils.clip_grads_with_norm_`. It is no collective operation, and the host waits for nothing.

    Args:
        gradients: Tensors, DTensors among them in any mixture.
        max_norm: The largest allowed norm.
        norm: The norm that they have, from `total_norm`.

    Example:
        >>> import torch
        >>> gradient = torch.tensor([3.0, 4.0])
        >>> clip_([gradient], max_norm=1.0, norm=total_norm([gradient]))
        >>> gradient
        tensor([0.6000, 0.8000])
    """
    with torch.no_grad():
        kind = dtensor_type()
        if kind is not None:
            gradients = [local_tensor(gradient) for gradient in gradients]
        if _uniform(gradients) and norm.device == gradients[0].device:
            foreach_multiply_([*gradients], torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        else:
            holders = [_Holder(gradient) for gradient in gradients]
            torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)  # type: ignore[arg-type]


@final
class _Holder:
    """What `clip_grads_with_norm_` takes for a parameter: something with a gradient."""

    __slots__ = ("grad",)

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _uniform(gradients: Sequence[Tensor]) -> bool:
    """Whether all are ordinary tensors of one type on one CPU or CUDA device, for which torch itself would use its foreach functions."""
    if not gradients:
        return False
    dtype, device = gradients[0].dtype, gradients[0].device
    if device.type not in ("cpu", "cuda"):
        return False
    return all(type(gradient) is Tensor and gradient.dtype is dtype and gradient.device == device for gradient in gradients)


@final
@dataclass(frozen=True, slots=True)
class _Spread:
    """How a gradient is spread: over which dimensions of which mesh its parts differ."""

    mesh: DeviceMesh
    sharded: tuple[int, ...]


@torch.no_grad()
def _norm_over_ranks(gradients: Sequence[Tensor], kind: type[DTensor]) -> Tensor:
    home = local_tensor(gradients[0]).device
    # Plain gradients are reduced along with the first mesh.
    whole = _Spread(next(gradient.device_mesh for gradient in gradients if isinstance(gradient, kind)), ())
    parts: dict[_Spread, list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, kind):
            spread, local = _placed(gradient)
        else:
            spread, local = whole, gradient
        parts.setdefault(spread, []).append(torch.view_as_real(local) if local.is_complex() else local)
    squares = {spread: _squared_norm(locals_, device=home) for spread, locals_ in parts.items()}
    for mesh in dict.fromkeys(spread.mesh for spread in squares):
        _sum_over(mesh, squares)
    return torch.stack([*squares.values()]).sum().sqrt().float()


def _placed(gradient: DTensor) -> tuple[_Spread, Tensor]:
    """How a gradient is spread, and this rank's part of it."""
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate  # noqa: PLC0415 - slow to import, and loaded where there is a DTensor

        settled = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=settled)
    sharded = tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return _Spread(gradient.device_mesh, sharded), gradient.to_local()


def _squared_norm(tensors: list[Tensor], *, device: torch.device) -> Tensor:
    norms = foreach_norms(tensors, dtype=torch.float64)
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def _sum_over(mesh: DeviceMesh, squares: dict[_Spread, Tensor]) -> None:
    """Sums the squared norms over a mesh, in place, with one collective operation for each of its dimensions.

    Over a dimension along which a gradient is replicated the mean is taken. It is the same number again, but also where the ranks differ
    in the last bit, or a plain gradient was never reduced: clipping by different norms would let the ranks drift apart in silence.
    """
    spreads = [spread for spread in squares if spread.mesh == mesh]
    for index in range(mesh.ndim):
        size = mesh.size(index)
        if size > 1:
            values = torch.stack([squares[spread] if index in spread.sharded else squares[spread] / size for spread in spreads])
            all_reduce_(values, group=mesh.get_group(index), op=dist.ReduceOp.SUM)
            squares.update(zip(spreads, values.unbind(), strict=True))
