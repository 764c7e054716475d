"""TF32: what an Ampere or newer GPU multiplies fp32 matrices in, where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from halfstep._torch import Overload

__all__ = ["TF32_OPERATIONS", "round_to_tf32"]

_ATEN: Final = torch.ops.aten
_DROPPED_BITS: Final = 13  # fp32 has 23 bits of mantissa, TF32 has 10.


def round_to_tf32(tensor: Tensor) -> Tensor:
    """An fp32 tensor with its values rounded to the 10 bits of mantissa of TF32, of its own range.

    A value half-way between two is rounded away from zero, as `cvt.rna.tf32.f32` does, the conversion that GPUs have for this (NVIDIA,
    PTX ISA, section on `cvt`). Infinities and NaNs stay.

    Args:
        tensor: Of dtype float32, of any shape.

    Returns:
        A new tensor of the same shape.

    Example:
        >>> round_to_tf32(torch.tensor([1.0, 1 + 2**-11, 1 + 2**-12, float("inf")]))
        tensor([1.0000, 1.0010, 1.0000,    inf])
    """
    bits = tensor.contiguous().view(torch.int32) if tensor.dim() else tensor.reshape(1).view(torch.int32)
    rounded = ((bits + (1 << (_DROPPED_BITS - 1))) & -(1 << _DROPPED_BITS)).view(torch.float32).reshape(tensor.shape)
    return torch.where(tensor.isnan(), tensor, rounded)


def _round(value: Any) -> Any:
    return round_to_tf32(value) if isinstance(value, Tensor) and value.dtype is torch.float32 and value.is_cpu else value


def _rounding(*places: int) -> Callable[[Any, Any, Any], Any]:
    """Runs an operation with some of its arguments, by place, rounded."""

    def run(operation: Any, args: Any, kwargs: Any) -> Any:
        return operation(*(_round(each) if place in places else each for place, each in enumerate(args)), **kwargs)

    return run


def _convolution_backward(operation: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the bias is a sum, and no product of matrices: it takes the incoming gradient as it is."""
    gradient, x, weight, *rest, mask = args
    results = operation(_round(gradient), _round(x), _round(weight), *rest, [mask[0], mask[1], False], **kwargs)
    if not mask[2]:
        return results
    return results[0], results[1], gradient.sum([0, *range(2, gradient.dim())])


# Linear layers, attention by hand and einsum come down to these. Products with a vector (mv, dot) do not run on Tensor Cores.
TF32_OPERATIONS: Final[Mapping[Any, Callable[[Any, Any, Any], Any]]] = MappingProxyType(
    {
        **dict.fromkeys((_ATEN.mm.default, _ATEN.mm.out, _ATEN.bmm.default, _ATEN.bmm.out), _rounding(0, 1)),
        **dict.fromkeys((_ATEN.addmm.default, _ATEN.addmm.out, _ATEN.addmm_.default), _rounding(1, 2)),
        **dict.fromkeys((_ATEN.baddbmm.default, _ATEN.baddbmm.out, _ATEN.baddbmm_.default), _rounding(1, 2)),
        **dict.fromkeys((_ATEN.addbmm.default, _ATEN.addbmm.out, _ATEN.addbmm_.default), _rounding(1, 2)),
        Overload.named("aten::_addmm_activation").call: _rounding(1, 2),
        _ATEN.convolution.default: _rounding(0, 1),
        _ATEN.convolution_backward.default: _convolution_backward,
    }
)
