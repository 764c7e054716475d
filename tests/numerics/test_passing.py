"""What passes through to native half kernels is what fp32 would give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep._torch import Overload, all_overloads
from halfstep.numerics.passing import PASSED_THROUGH, kind_of_pass, passes_through

HALVES = (torch.float16, torch.bfloat16)

# What is held against fp32. The others convert, or make a tensor from no values, or draw random numbers.
CHECKED = ("moves", "chooses", "answers", "rounds")

# What is not held against fp32, and why.
SKIPPED = {
    "_indices_copy": "of sparse tensors, whose values are moved",
    "_pin_memory": "needs an accelerator",
    "_sparse_coo_tensor_with_dims_and_tensors": "of sparse tensors, whose values are moved",
    "_values_copy": "of sparse tensors, whose values are moved",
    "indices_copy": "of sparse tensors, whose values are moved",
    "argsort.stable": "does what argsort does, and needs an argument by name",
    "nonzero_static": "does what nonzero does, and needs an argument by name",
    "sort.stable": "does what sort does, and needs an argument by name",
    "is_nonzero": "takes one value alone",
    "repeat_interleave.Tensor": "takes whole numbers alone",
    "sparse_mask": "of sparse tensors, whose values are moved",
    "values_copy": "of sparse tensors, whose values are moved",
    "view_copy.dtype": "reads the same bits as another dtype",
}

SMALL, ROWS, IMAGE, VOLUME = (4,), (4, 4), (2, 2, 4, 4), (1, 2, 4, 4, 4)
SHAPES = (ROWS, SMALL, (2, 4, 4), IMAGE, (2, 2, 4, 4, 4))
NUMBERS: dict[str, Any] = {"int": 0, "SymInt": 0, "float": 0.5, "number": 0.1, "Scalar": 0.1, "bool": False, "str": "left"}


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any half values: infinities, NaNs, subnormals, zeros of both signs, and many that are equal."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0, -(2**15), 1, 0x03FF, 0x7BFF, 0x7C00, -0x0400, 0x7F7F, 0x7FC0, 0x3C00, -0x4400], dtype=torch.int16)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    chosen = special[torch.randint(len(special), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, bits, chosen).view(dtype)


# What a schema does not tell: `half(shape)` makes a tensor.
SPECIAL: dict[str, Callable[[Callable[..., Tensor]], list[Any]]] = {
    "_chunk_cat": lambda half: [[half(*ROWS), half(*ROWS)], 0, 2],
    "_reshape_copy": lambda half: [half(*ROWS), [2, 8]],
    "_unsafe_view": lambda half: [half(*ROWS), [2, 8]],
    "adaptive_max_pool3d": lambda half: [half(*VOLUME), [2, 2, 2]],
    "as_strided_scatter": lambda half: [half(*ROWS), half(*SMALL), [4], [4]],
    "channel_shuffle": lambda half: [half(*IMAGE), 2],
    "diagonal_backward": lambda half: [half(*SMALL), [4, 4], 0, 0, 1],
    "diagonal_scatter": lambda half: [half(*ROWS), half(*SMALL)],
    "expand_copy": lambda half: [half(*SMALL), [3, 4]],
    "flip": lambda half: [half(*ROWS), [0, 1]],
    "fractional_max_pool2d": lambda half: [half(*IMAGE), [2, 2], [2, 2], torch.full((2, 2, 2), 0.5, dtype=half(1).dtype)],
    "fractional_max_pool3d": lambda half: [half(*VOLUME), [2, 2, 2], [2, 2, 2], torch.full((1, 2, 3), 0.5, dtype=half(1).dtype)],
    "index_fill.int_Tensor": lambda half: [half(*ROWS), 0, torch.zeros(1, dtype=torch.int64), half()],
    "index_fill_.int_Tensor": lambda half: [half(*ROWS), 0, torch.zeros(1, dtype=torch.int64), half()],
    "kthvalue": lambda half: [half(*ROWS), 2],
    "masked_fill.Tensor": lambda half: [half(*ROWS), half(*ROWS) > 0, half()],
    "masked_fill_.Tensor": lambda half: [half(*ROWS), half(*ROWS) > 0, half()],
    "max_pool3d_with_indices": lambda half: [half(*VOLUME), [2, 2, 2]],
    "max_unpool3d": lambda half: [half(1, 1, 1, 1, 8), torch.arange(8).view(1, 1, 1, 1, 8), [1, 1, 16], [1, 1, 2], [0, 0, 0]],
    "native_channel_shuffle": lambda half: [half(*IMAGE), 2],
    "permute_copy": lambda half: [half(*ROWS), [1, 0]],
    "pixel_shuffle": lambda half: [half(1, 4, 2, 2), 2],
    "pixel_unshuffle": lambda half: [half(*IMAGE), 2],
    "reflection_pad2d": lambda half: [half(*IMAGE), [1, 1, 1, 1]],
    "reflection_pad3d": lambda half: [half(*VOLUME), [1, 1, 1, 1, 1, 1]],
    "repeat_interleave.self_Tensor": lambda half: [half(*SMALL), torch.tensor([1, 0, 2, 1])],
    "replication_pad2d": lambda half: [half(*IMAGE), [1, 1, 1, 1]],
    "replication_pad3d": lambda half: [half(*VOLUME), [1, 1, 1, 1, 1, 1]],
    "select_backward": lambda half: [half(*SMALL), [4, 4], 0, 1],
    "select_scatter": lambda half: [half(*ROWS), half(*SMALL), 0, 1],
    "slice_backward": lambda half: [half(*ROWS), [8, 4], 0, 0, 8, 2],
    "split_copy.Tensor": lambda half: [half(*ROWS), 2],
    "squeeze_copy.dims": lambda half: [half(4, 1, 1), [1, 2]],
    "unfold_copy": lambda half: [half(*ROWS), 0, 2, 1],
    "unsafe_chunk": lambda half: [half(*ROWS), 2],
    "unsafe_split.Tensor": lambda half: [half(*ROWS), 2],
    "view_copy": lambda half: [half(*ROWS), [2, 8]],
}


def overloads() -> list[Overload]:
    """Those that are called by people: without `out=`, names of dimensions, and generators."""
    found = []
    for overload in all_overloads():
        name = overload.short.partition(".")[0]
        arguments = overload.call._schema.arguments
        kinds = " ".join(str(each.type) for each in arguments)
        writes = any(each.is_out for each in arguments)
        is_plain = not writes and "Dimname" not in kinds and "Generator" not in kinds and not kinds.startswith("str")
        if kind_of_pass(name) in CHECKED and is_plain and overload.short not in SKIPPED:
            found.append(overload)
    return found


def by_schema(overload: Overload, shape: tuple[int, ...], half: Callable[..., Tensor]) -> list[Any]:
    """Arguments for an overload, which may not be what it takes."""
    args: list[Any] = []
    for argument in overload.call._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            break
        value: Any = None
        if argument.name in ("mask", "condition"):
            value = half(*shape) > 0
        elif argument.name in ("index", "indices") and "Tensor" in kind:
            value = torch.zeros(shape, dtype=torch.int64) if kind == "Tensor" else [torch.zeros(2, dtype=torch.int64)]
        elif kind == "Tensor":
            value = half(*shape)
        elif kind == "List[Tensor]":
            value = [half(*shape), half(*shape)]
        elif kind.startswith("List["):
            value = [1] * min(len(shape), 2)
        elif not kind.startswith("Optional["):
            value = NUMBERS[kind]
        args.append(value)
    return args


def widened(value: Any) -> Any:
    if isinstance(value, list):
        return [widened(each) for each in value]
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else copied(value)


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def same(native: Any, wide: Any) -> bool:
    """Whether what a half kernel gives is what fp32 gives, rounded; NaNs are the same, and zeros of both signs are not."""
    if isinstance(native, list | tuple):
        return len(native) == len(wide) and all(same(one, other) for one, other in zip(native, wide, strict=True))
    if not isinstance(native, Tensor):
        return bool(native == wide)
    rounded = wide.to(native.dtype)
    if native.dtype not in HALVES:
        return bool(torch.equal(native, rounded))
    equal = (native.view(torch.int16) == rounded.view(torch.int16)) | (native.isnan() & rounded.isnan())
    return native.shape == rounded.shape and bool(equal.all())


def arguments_of(overload: Overload, dtype: torch.dtype) -> list[Any]:
    seeds = count()

    def half(*shape: int) -> Tensor:
        return values(*shape, dtype=dtype, seed=next(seeds))

    if overload.short in SPECIAL:
        return SPECIAL[overload.short](half)
    for shape in SHAPES:
        args = by_schema(overload, shape, half)
        try:
            overload.call(*copied(args))
        except (RuntimeError, IndexError):
            continue
        return args
    raise AssertionError(f"{overload.name} needs arguments of its own: {overload.call._schema}")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("overload", overloads(), ids=lambda each: each.short)
def test_native_half_kernels_give_the_bits_of_fp32(overload: Overload, dtype: torch.dtype) -> None:
    args = arguments_of(overload, dtype)
    native, wide = copied(args), widened(args)
    assert same(overload.call(*native), overload.call(*wide))
    if "_." in overload.name or overload.name.endswith("_"):
        assert same(native, wide)  # What was written to.


def test_every_name_is_that_of_an_operation() -> None:
    names = {each.short.partition(".")[0] for each in all_overloads()}
    assert [name for name in PASSED_THROUGH if name not in names] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("clone", "moves"), ("relu", "chooses"), ("_to_copy", "converts"), ("empty", "makes"), ("eq", "answers"), ("bernoulli_", "draws")],
)
def test_each_reason_has_a_word(name: str, kind: str) -> None:
    assert kind_of_pass(name) == kind
    assert passes_through(f"aten::{name}")


def test_what_computes_does_not_pass_through() -> None:
    assert kind_of_pass("gelu") is None
    assert not passes_through("aten::gelu")
    assert passes_through("torchvision::nms")
