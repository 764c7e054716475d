"""The gradients of an optimizer: unscaled, and checked for infinities and NaN, without a wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._torch import check_and_unscale_, dense_parts
from halfstep.errors import ConfigurationError, InvalidTypeError

__all__ = ["GradientGroups", "are_simple", "check_finite_", "collect_gradients", "unscale_gradients_"]

# Gradients that one kernel call can take together.
GradientGroups = Mapping[tuple[torch.device, torch.dtype], list[Tensor]]


def are_simple(gradients: Sequence[Tensor]) -> bool:
    """Whether one kernel can take all gradients as they are: dense, of type fp32, on one device, outside of autograd.

    Example:
        >>> are_simple([torch.ones(2), torch.ones(())]), are_simple([torch.ones(2), torch.ones(2, dtype=torch.float64)])
        (True, False)
    """
    device = gradients[0].device if gradients else None
    for gradient in gradients:
        if type(gradient) is not Tensor or gradient.dtype is not torch.float32 or gradient.layout is not torch.strided:
            return False
        if gradient.device != device or gradient.requires_grad:
            return False
    return True


def collect_gradients(param_groups: Iterable[Mapping[str, Any]]) -> GradientGroups:
    """The gradients of all parameters, as dense real tensors that share memory with them, by device and dtype.

    Of a DTensor it is this rank's part, of a sparse gradient its values, and of a complex one its real and imaginary parts.

    Args:
        param_groups: An optimizer's.

    Raises:
        InvalidTypeError: A parameter is no tensor.
        ConfigurationError: A gradient is stored in half precision.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> collect_gradients([{"params": [weight]}])
        {(device(type='cpu'), torch.float32): [tensor([1., 1.])]}
    """
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            try:
                gradient = parameter.grad
            except AttributeError as error:
                raise InvalidTypeError(
                    f"Parameter {index} of the optimizer's group {number} must be a tensor, not a {type(parameter).__name__}."
                ) from error
            if gradient is None:
                continue
            dtype = gradient.dtype
            if dtype is not torch.float32:
                _check_dtype(parameter, gradient, group=group, where=f"parameter {index} of group {number}")
            if type(gradient) is not Tensor or gradient.layout is not torch.strided or dtype.is_complex:
                gradient = _plain(gradient)
            found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found


def _check_dtype(parameter: Tensor, gradient: Tensor, *, group: Mapping[str, Any], where: str) -> None:
    if gradient.dtype in (torch.float16, torch.bfloat16, torch.complex32):
        names = [name for each, name in zip(group["params"], group.get("param_names", ()), strict=False) if each is parameter]
        where = f"{where}, {names[0]}" if names else where  # An optimizer that was made of named parameters knows their names.
        raise ConfigurationError(
            f"The gradient of {where}, of shape {tuple(parameter.shape)}, is {gradient.dtype}. A loss scaler needs gradients in fp32, in "
            "which they can be unscaled. Keep the parameters in fp32 with model.float() and let autocast lower the operations, instead of "
            "calling model.half() or model.bfloat16()."
        )


def _plain(gradient: Tensor) -> Tensor:
    module = sys.modules.get("torch.distributed.tensor")  # Where it was never imported, there is no DTensor.
    if module is not None and isinstance(gradient, module.DTensor):
        gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        gradient = dense_parts(gradient)[-1]
    gradient = gradient.detach()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def unscale_gradients_(gradients: GradientGroups, *, scale: Tensor, found_inf: Tensor, factor: Tensor | None = None) -> None:
    """Divides the gradients by the scale, in place, and sets `found_inf` to 1 if one of them was not finite before.

    Args:
        gradients: As from `collect_gradients`.
        scale: 0-dimensional float32.
        found_inf: 0-dimensional float32 on the scale's device, 0 or 1.
        factor: What they are multiplied by besides, 0-dimensional float32; `None` for 1.

    Source: `torch.amp.GradScaler`, whose arithmetic this follows bit for bit: the reciprocal is taken in float64 and rounded.
    """
    inverse = scale.double().reciprocal().float()
    _run(gradients, factor=inverse if factor is None else inverse * factor, found_inf=found_inf)


def check_finite_(gradients: GradientGroups, *, found_inf: Tensor) -> None:
    """Sets `found_inf` to 1 if a gradient is not finite; the gradients stay as they are.

    Example:
        >>> found = torch.zeros(())
        >>> check_finite_({(found.device, found.dtype): [torch.tensor([1.0, float("nan")])]}, found_inf=found)
        >>> found
        tensor(1.)
    """
    _run(gradients, factor=torch.ones((), dtype=torch.float32, device=found_inf.device), found_inf=found_inf)


@torch.no_grad()
def _run(gradients: GradientGroups, *, factor: Tensor, found_inf: Tensor) -> None:
    for (device, _), tensors in gradients.items():
        if device == found_inf.device:
            check_and_unscale_(tensors, found_inf=found_inf, inverse_scale=factor)
            continue
        there = torch.zeros((), dtype=torch.float32, device=device)
        check_and_unscale_(tensors, found_inf=there, inverse_scale=factor.to(device, non_blocking=True))
        found_inf.copy_(torch.maximum(found_inf, there.to(found_inf.device, non_blocking=True)))
