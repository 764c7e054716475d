"""Arguments for each overload that autocast has a say in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._torch import Overload

__all__ = ["SKIPPED", "arguments", "mixes"]

Arguments: TypeAlias = list[Any]

# What cannot be called here, and why.
SKIPPED = {
    "_cudnn_rnn": "cuDNN's own: a CPU has no kernel for it",
    "_scaled_dot_product_flash_attention": "CUDA's own: a CPU has no kernel for it",
    "_thnn_fused_gru_cell": "CUDA's own: a CPU has no kernel for it",
    "_thnn_fused_lstm_cell": "CUDA's own: a CPU has no kernel for it",
    "cudnn_convolution": "cuDNN's own: a CPU has no kernel for it",
    "cudnn_convolution_transpose": "cuDNN's own: a CPU has no kernel for it",
    "gru_cell": "one kernel on CUDA, which knows no fake tensors",
    "lstm_cell": "one kernel on CUDA, which knows no fake tensors",
    "binary_cross_entropy": "raises, which is tested by itself",
    "nuclear_norm": "calls a kernel of linear algebra that fake tensors of CUDA lack here",
    "nuclear_norm.dim": "calls a kernel of linear algebra that fake tensors of CUDA lack here",
}


def full(*shape: int) -> Tensor:
    return torch.full(shape, 0.5)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


_IMAGE = (4, 4, 4, 4)

# For those that a number of dimensions does not describe.
_SPECIAL: dict[str, Callable[[], Arguments]] = {
    "addbmm": lambda: [full(4, 4), full(2, 4, 4), full(2, 4, 4)],
    "addmv": lambda: [full(4), full(4, 4), full(4)],
    "addr": lambda: [full(4, 4), full(4), full(4)],
    "bilinear": lambda: [full(4, 4), full(4, 4), full(4, 4, 4)],
    "conv_tbc": lambda: [full(5, 4, 4), full(3, 4, 4), full(4)],
    "conv_transpose1d": lambda: [full(2, 4, 4), full(4, 4, 2)],
    "conv_transpose3d.input": lambda: [full(1, 4, 2, 2, 2), full(4, 4, 2, 2, 2)],
    "cosine_embedding_loss": lambda: [full(4, 4), full(4, 4), full(4).sign()],
    "cross": lambda: [full(4, 3), full(4, 3), 1],
    "einsum": lambda: ["ij,jk->ik", [full(4, 4), full(4, 4)]],
    "grid_sampler": lambda: [full(*_IMAGE), full(4, 4, 4, 2), 0, 0, False],
    "index_put": lambda: [full(4, 4), [whole(2)], full(2, 4)],
    "layer_norm": lambda: [full(4, 4), [4]],
    "multi_margin_loss": lambda: [full(4, 4), whole(4)],
    "multilabel_margin_loss": lambda: [full(4, 4), whole(4, 4)],
    "mv": lambda: [full(4, 4), full(4)],
    "native_layer_norm": lambda: [full(4, 4), [4], None, None, 1e-5],
    "nll_loss": lambda: [full(4, 4), whole(4)],
    "nll_loss2d": lambda: [full(*_IMAGE), whole(4, 4, 4)],
    "rms_norm": lambda: [full(4, 4), [4]],
    "scatter_add": lambda: [full(4, 4), 0, whole(4, 4), full(4, 4)],
    **{
        name: lambda: [full(*_IMAGE), [8, 8], False]
        for name in ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "upsample_bilinear2d")
    },
    **{name: lambda: [full(*_IMAGE), [8, 8]] for name in ("_upsample_nearest_exact2d", "upsample_nearest2d")},
    **{name: lambda: [full(1, 2, 4, 4, 4), [8, 8, 8]] for name in ("_upsample_nearest_exact3d", "upsample_nearest3d")},
    "upsample_trilinear3d": lambda: [full(1, 2, 4, 4, 4), [8, 8, 8], False],
}
_SHAPES = ((4, 4), (4,), (2, 4, 4), _IMAGE, (1, 2, 2, 4, 4), ())
_NUMBERS: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "Scalar": 1.0, "bool": False, "str": "sum"}


def arguments(name: str) -> tuple[Arguments, dict[str, Any]]:
    """What an overload can be called with, in fp32."""
    overload = Overload.named(f"aten::{name}")
    if name in _SPECIAL:
        return _SPECIAL[name](), {}
    for shape in _SHAPES:
        args, kwargs = _by_schema(overload, shape)
        try:
            overload.call(*args, **kwargs)
        except (RuntimeError, IndexError):
            continue
        return args, kwargs
    raise AssertionError(f"{name} needs arguments of its own: {overload.call._schema}")


def _by_schema(overload: Overload, shape: tuple[int, ...]) -> tuple[Arguments, dict[str, Any]]:
    args: Arguments = []
    kwargs: dict[str, Any] = {}
    for argument in overload.call._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        value: Any = None
        if kind == "Tensor":
            value = full(*shape)
        elif kind == "List[Tensor]":
            value = [full(*shape), full(*shape)]
        elif kind.startswith("List["):
            value = [1]
        elif not kind.startswith("Optional["):
            value = _NUMBERS[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def mixes(args: Arguments, kwargs: dict[str, Any], half: torch.dtype) -> dict[str, tuple[Arguments, dict[str, Any]]]:
    """The same in fp32, in half, and with the first tensor alone in half."""
    count = 0

    def cast(value: Any, which: Callable[[int], bool]) -> Any:
        nonlocal count
        if isinstance(value, list):
            return [cast(each, which) for each in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        count += 1
        return value.to(half) if which(count) else value

    found = {}
    for name, which in (("fp32", lambda _: False), ("half", lambda _: True), ("mixed", lambda place: place == 1)):
        count = 0
        found[name] = (cast(args, which), {key: cast(value, which) for key, value in kwargs.items()})
    return found
