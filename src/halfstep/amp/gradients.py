"""The gradients of one backward pass, apart from those that were there before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import check_and_unscale_, dense_parts
from halfstep.precision import HALVES
from halfstep.scaler import check_finite_
from halfstep.scaler.gradients import collect_gradients, unscale_gradients_

__all__ = ["GradientsAside", "scale_again_", "unscale_"]


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters of all of them, each once."""
    found = {id(each): each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return list(found.values())


@final
class GradientsAside:
    """Gradients that are put aside while a backward pass computes others with another scale.

    Args:
        optimizers: Whose gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # DistributedDataParallel may keep gradients in the buckets that the next backward pass overwrites.
        copies = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._parameters = _parameters(optimizers)
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad.clone() if copies else parameter.grad))
                parameter.grad = None

    def restore(self) -> None:
        """Puts them back in place of what a backward pass that failed has left."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in self._kept:
            parameter.grad = gradient

    @torch.no_grad()
    def add(self) -> None:
        """Adds them to those that were computed since."""
        for parameter, kept in self._kept:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = kept
            elif gradient.layout is torch.strided:
                gradient.add_(kept)
            elif gradient.dtype in HALVES:  # On a CPU torch does not add sparse tensors in half.
                parameter.grad = (kept.float() + gradient.float()).to(gradient.dtype)
            else:
                parameter.grad = kept + gradient


@torch.no_grad()
def scale_again_(optimizer: Optimizer, *, scale: Tensor) -> None:
    """Multiplies the gradients of an optimizer by the scale, in place, so that scaled ones can be added to them.

    Args:
        optimizer: Whose gradients, unscaled.
        scale: 0-dimensional float32.
    """
    gradients = [parameter.grad for parameter in _parameters([optimizer]) if parameter.grad is not None]
    factor = scale.item() if gradients else 1.0  # As a number, which multiplies gradients in half in fp32.
    for gradient in gradients:
        gradient.mul_(factor)


@torch.no_grad()
def unscale_(optimizers: Sequence[Optimizer], *, scale: Tensor, rechecks: bool) -> Tensor:
    """Divides the gradients of some optimizers by the scale, in place, and tells whether all were finite; waits for no device.

    Gradients in half are divided in fp32 and rounded: the reciprocal of a large scale is no number of fp16, and the CUDA kernel takes no
    bf16.

    Args:
        optimizers: Whose gradients. Those of a parameter that two of them have are divided once.
        scale: 0-dimensional float32.
        rechecks: Whether the scale may be below 1, so that a finite gradient may become infinite.

    Returns:
        0-dimensional float32 on the scale's device: 1 if a gradient was not finite, 0 otherwise.
    """
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    parameters = [each for each in _parameters(optimizers) if each.grad is not None]
    wide = collect_gradients([{"params": [each for each in parameters if each.grad is not None and each.grad.dtype not in HALVES]}])
    unscale_gradients_(wide, scale=scale, found_inf=found)
    if rechecks:
        check_finite_(wide, found_inf=found)
    inverse = scale.double().reciprocal().float()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype in HALVES:
            stored = dense_parts(gradient)[-1]  # Of a sparse one its values.
            there = torch.zeros((), dtype=torch.float32, device=gradient.device)
            values = stored.float()
            check_and_unscale_([values], found_inf=there, inverse_scale=inverse.to(gradient.device))
            stored.copy_(values)
            if rechecks:
                check_finite_({(gradient.device, torch.float32): [stored.float()]}, found_inf=there)
            found.copy_(torch.maximum(found, there.to(found.device)))
    return found
