"""A rehearsal against the CPU's own half kernels, and against fp32 that is rounded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from halfstep._torch import DispatchMode, schema_of
from halfstep.numerics import rehearse
from halfstep.numerics.passing import PASSED_THROUGH
from tests.numerics.models import STEPS

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (FP16, BF16)

# Where a native half kernel of the CPU is farther away than one unit in the last place, and why. docs/rehearsal.md has the same table.
EXCEPTIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": "rounds the probabilities to half before it multiplies them",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "rounds the probabilities and their gradients to half",
    "mkldnn_rnn_layer": "rounds within a layer, from step to step",
    "mkldnn_rnn_layer_backward": "rounds within a layer, from step to step",
    "sigmoid_backward": "rounds products in between",
    "native_dropout": "rounds the factor 1 / (1 - p) to half",
}


def ordered(tensor: Tensor) -> Tensor:
    """Whole numbers that are one apart where half values are neighbours; NaNs are all the same."""
    bits = tensor.contiguous().view(torch.int16).int()
    numbers = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    return torch.where(tensor.isnan(), torch.full_like(numbers, 1 << 20), numbers)


def units_apart(one: Tensor, other: Tensor) -> int:
    """The greatest distance, in units in the last place."""
    assert one.dtype is other.dtype
    assert one.shape == other.shape
    return int((ordered(one) - ordered(other)).abs().max()) if one.numel() else 0


def each_tensor(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


class Beside(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation that a rehearsal computes by the CPU's own half kernel as well, and notes how far apart the results are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.farthest: dict[str, int] = {}
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, schema_of(func)
        name = schema.name.removeprefix("aten::")
        if any(isinstance(each, Tensor) and each.dtype in HALVES for each in args):
            self.seen.add(name)
            if not (schema.is_view or schema.written or name in PASSED_THROUGH):
                with _disable_current_modes():
                    native = func(*args, **kwargs)
                result = func(*args, **kwargs)
                for one, other in zip(each_tensor(native), each_tensor(result), strict=True):
                    self._compare(name, one, other)
                return result
        return func(*args, **kwargs)

    def _compare(self, name: str, native: Tensor, result: Tensor) -> None:
        if result.dtype not in HALVES or not result.numel():
            return
        # What cancels out differs by what the order of summation does to the summands, and not by the last place of the difference.
        close = (native.float() - result.float()).abs() <= result.float().abs().max() * 2**-18
        apart = torch.where(close, 0, (ordered(native) - ordered(result)).abs())
        self.farthest[name] = max(self.farthest.get(name, 0), int(apart.max()))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_each_operation_of_a_step_is_that_of_a_half_kernel(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with rehearse("cuda", dtype), Beside() as beside:
        with torch.autocast("cpu", dtype=dtype):
            loss = STEPS[name]()
        (loss * 64).backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert {operation for operation, apart in beside.farthest.items() if apart > 1} <= set(EXCEPTIONS)
    # Each is computed in fp32, is a view, or stands in the table of what passes through; and those that compute were seen.
    assert len(beside.farthest) > 3
    assert beside.farthest.keys() <= beside.seen


def test_the_documentation_lists_every_exception() -> None:
    text = (Path(__file__).parents[2] / "docs/rehearsal.md").read_text(encoding="utf-8")
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| `"))
    listed = {name.strip("`"): reason.strip() for name, reason in rows.items()}
    assert {name: reason for name, reason in listed.items() if name in EXCEPTIONS} == EXCEPTIONS


def test_the_documentation_lists_what_passes_through() -> None:
    text = (Path(__file__).parents[2] / "docs/rehearsal.md").read_text(encoding="utf-8")
    missing = [name for name in PASSED_THROUGH if f"`{name}`" not in text]
    assert missing == []


def halves(dtype: torch.dtype, *, least: int = 1, most: int = 40) -> st.SearchStrategy[Tensor]:
    """Vectors of any half values: infinities, NaNs, subnormals, the largest finite one, zeros of both signs, and ordinary ones."""
    anything = st.integers(-(2**15), 2**15 - 1)
    special = st.sampled_from([0, -(2**15), 1, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7FC0, 0x3C00, -1])
    return st.lists(anything | special, min_size=least, max_size=most).map(lambda bits: torch.tensor(bits, dtype=torch.int16).view(dtype))


def both_halves(**sizes: int) -> st.SearchStrategy[Tensor]:
    return st.one_of([halves(dtype, **sizes) for dtype in HALVES])


def ordinary(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Positive values of like size, so that sums have no cancellation."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("abs", "neg", "relu", "exp", "expm1", "log", "log1p", "log2", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid"),
            *("floor", "ceil", "round", "trunc", "frac", "square", "reciprocal", "sign", "atan", "sinh", "cosh", "isnan", "isfinite"),
        )
    },
    **{name: getattr(F, name) for name in ("silu", "mish", "elu", "leaky_relu", "softplus", "hardtanh", "hardswish", "selu")},
    "times a number": lambda x: x * 0.1,
    "by a number": lambda x: x / 3.3,
    "clamp": lambda x: x.clamp(-1.5, 0.3),
    "clamp that is no half": lambda x: x.clamp(max=1 - 1e-6),
    "masked fill": lambda x: x.masked_fill(x > 1, 0.1),
    "where": lambda x: torch.where(x > 1, x, x * x),
    "compared": lambda x: x == 0.1,
    "to double": lambda x: x.double(),
    "cumulative maximum": lambda x: x.cummax(0).values,
    "sorted": lambda x: x.sort().values,
    "flipped": lambda x: x.flip(0),
    "concatenated": lambda x: torch.cat([x, x.neg()]),
    "in place": lambda x: x.clone().mul_(x).add_(x).div_(3.0),
    "transposed": lambda x: x.expand(3, -1).t().exp(),
    "channels last": lambda x: x.expand(1, 2, 2, -1).contiguous(memory_format=torch.channels_last).tanh(),
    "empty": lambda x: x[:0].exp(),
    "no dimension": lambda x: x[0] * x,
}

# The vectorized kernels for half and for fp32 use other approximations, or flush subnormal results in other places.
NOT_NATIVE = {"tan", "sinh", "cosh"}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all values are the same, NaNs included, zeros of both signs apart."""
    if one.dtype in HALVES:
        return units_apart(one, other) == 0
    return one.dtype is other.dtype and bool(torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)))


@pytest.mark.parametrize("name", sorted(POINTWISE))
@given(x=both_halves())
@settings(max_examples=25, deadline=None)
def test_pointwise_results_are_those_of_half_kernels_bit_for_bit(name: str, x: Tensor) -> None:
    function = POINTWISE[name]
    native = function(x)
    with rehearse("cpu", x.dtype):
        rehearsed = function(x)
    assert rehearsed.dtype is native.dtype
    if name in NOT_NATIVE:
        tiny = 2 * torch.finfo(x.dtype).tiny  # Some kernels take what is subnormal for zero.
        flushed = (x.abs() <= tiny) | ((native.abs() <= tiny) & (rehearsed.abs() <= tiny))
        assert units_apart(rehearsed.masked_fill(flushed, 0), native.masked_fill(flushed, 0)) <= 1
    else:
        assert same_bits(rehearsed, native)


ROUNDED_ONCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "scaled add": lambda a, b: torch.add(a, b, alpha=0.3),
    "a number added": lambda a, b: a + 0.1,
    "a number less": lambda a, b: 0.1 - a,
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.7),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=0.7),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "gelu": lambda a, b: F.gelu(a),
    "erf": lambda a, b: torch.erf(a),
    "softmax": lambda a, b: a.softmax(0),
    "log softmax": lambda a, b: a.log_softmax(0),
    "sum": lambda a, b: a.sum(),
    "mean": lambda a, b: a.mean(),
    "prod": lambda a, b: a.prod(),
    "cumsum": lambda a, b: a.cumsum(0),
    "logcumsumexp": lambda a, b: a.logcumsumexp(0),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "layer norm": lambda a, b: F.layer_norm(a, a.shape),
    "smooth l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "huber": lambda a, b: F.huber_loss(a, b, reduction="none"),
}


@pytest.mark.parametrize("name", sorted(ROUNDED_ONCE))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_results_are_fp32_rounded_once_bit_for_bit(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    function = ROUNDED_ONCE[name]
    a = data.draw(halves(dtype))
    b = data.draw(halves(dtype, least=len(a), most=len(a)))
    expected = function(a.float(), b.float()).to(dtype)
    with rehearse("cuda", dtype):
        rehearsed = function(a, b)
    assert rehearsed.dtype is dtype
    assert units_apart(rehearsed, expected) == 0


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 7), (7, 3))),
    "bmm": (torch.bmm, ((2, 5, 7), (2, 7, 3))),
    "addmm": (torch.addmm, ((3,), (5, 7), (7, 3))),
    "baddbmm": (torch.baddbmm, ((2, 5, 3), (2, 5, 7), (2, 7, 3))),
    "mv": (torch.mv, ((5, 7), (7,))),
    "linear": (F.linear, ((4, 7), (3, 7), (3,))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 5, 7), (2, 3, 7))),
    "conv1d": (F.conv1d, ((2, 4, 9), (6, 4, 3), (6,))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, dilation=1), ((2, 3, 6, 6), (4, 3, 3, 3), (4,))),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), ((1, 4, 5, 5), (4, 2, 3, 3))),
    "conv3d": (F.conv3d, ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2))),
    "conv_transpose2d": (F.conv_transpose2d, ((1, 3, 4, 4), (3, 2, 2, 2))),
    "sum": (lambda x: x.sum(1), ((3, 50),)),
    "mean": (lambda x: x.mean(0), ((40, 3),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), ((1, 2, 6, 6),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), ((1, 2, 7, 7),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2), ((1, 2, 7, 7),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 2, 3, 3),)),
    "embedding": (lambda w: F.embedding(torch.tensor([0, 2, 2, 1]), w), ((3, 4),)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), ((6, 3, 2, 2),)),
    "group norm": (lambda x: F.group_norm(x, 2), ((2, 4, 3, 3),)),
    "rms norm": (lambda x: F.rms_norm(x, (8,)), ((4, 8),)),
    "attention by hand": (lambda q, k, v: ((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v, ((2, 4, 8), (2, 5, 8), (2, 5, 8))),
    "gru cell": (
        torch.gru_cell,
        ((2, 3), (2, 4), (12, 3), (12, 4)),
    ),
}


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", sorted(PRODUCTS))
@given(seed=st.integers(0, 2**16))
@settings(max_examples=5, deadline=None)
def test_each_operation_is_fp32_rounded_once_forward_and_backward(name: str, dtype: torch.dtype, seed: int) -> None:
    """Each operation by itself, found by a mode, against the same operation in fp32 on what it was given."""
    function, shapes = PRODUCTS[name]
    tensors = [ordinary(*shape, seed=seed + place, dtype=dtype) for place, shape in enumerate(shapes)]

    # Convolutions choose their algorithm, and with it the order of summation, by how memory is aligned.
    allowed = int("conv" in name)

    def widened(value: Any) -> Any:
        return FP32 if value is dtype else value.float() if isinstance(value, Tensor) and value.dtype is dtype else value

    class Recomputing(DispatchMode):  # type: ignore[no-untyped-call]
        checked = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            schema = schema_of(func)
            name = schema.name.removeprefix("aten::")
            if schema.written or schema.is_view or name in PASSED_THROUGH:
                return result
            if any(isinstance(each, Tensor) and each.dtype is dtype for each in args):
                with _disable_current_modes():
                    wide = func(*map(widened, args), **(kwargs or {}))
                for one, other in zip(each_tensor(wide), each_tensor(result), strict=True):
                    if other.dtype is dtype:
                        assert units_apart(one.to(dtype), other) <= allowed
                Recomputing.checked += 1
            return result

    with rehearse("cuda", dtype), Recomputing():  # type: ignore[no-untyped-call]
        results = with_gradients(function, tensors)
    assert all(each.dtype is dtype for each in results)
    if name not in ("max_pool2d", "embedding", "batch norm", "rms norm"):  # These consist of others, or write to what they are given.
        assert Recomputing.checked


@pytest.mark.parametrize("name", ["in place", "out", "foreach", "fused optimizer", "unscale"])
def test_what_is_written_is_rounded_into_the_tensor_that_was_given(name: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=FP16)
    y = torch.tensor([0.1, 0.2, 0.3], dtype=FP16)
    with rehearse("cuda"):
        if name == "in place":
            view = x[:2]
            assert view.addcmul_(y[:2], y[:2], value=0.5) is view
            assert torch.equal(x[:2], torch.tensor([1.0, 2.0]).addcmul(y[:2].float(), y[:2].float(), value=0.5).half())
        elif name == "out":
            out = torch.empty(0, dtype=FP16)
            assert torch.exp(y, out=out) is out
            assert torch.equal(out, y.float().exp().half())
        elif name == "foreach":
            torch._foreach_add_([x, y], [y, y], alpha=0.3)
            assert torch.equal(
                y, torch.add(torch.tensor([0.1, 0.2, 0.3]).half().float(), torch.tensor([0.1, 0.2, 0.3]).half().float(), alpha=0.3).half()
            )
        elif name == "fused optimizer":
            weight, exact = torch.nn.Parameter(x.clone()), torch.nn.Parameter(x.float())
            for each in (weight, exact):
                each.grad = torch.full_like(each, 0.25)
                torch.optim.AdamW([each], lr=0.1, fused=True).step()
            assert torch.equal(weight, exact.half())
        else:
            found, inverse = torch.zeros(1), torch.tensor([0.3])
            torch._amp_foreach_non_finite_check_and_unscale_([x, y], found, inverse)
            assert found.item() == 0
            assert torch.equal(x, (torch.tensor([1.0, 2.0, 3.0]) * 0.3).half())


def test_statistics_are_what_the_target_keeps() -> None:
    x = torch.randn(4, 8, dtype=FP16)
    with rehearse("cuda"):
        assert [each.dtype for each in torch.native_layer_norm(x, [8], None, None, 1e-5)] == [FP16, FP32, FP32]
        norm = torch.nn.BatchNorm1d(8)
        assert norm(x).dtype is FP16
        assert norm.running_mean is not None
        assert norm.running_mean.dtype is FP32
    with rehearse("cpu"):
        assert [each.dtype for each in torch.native_layer_norm(x, [8], None, None, 1e-5)] == [FP16, FP16, FP16]


def test_running_statistics_of_a_half_model_are_written() -> None:
    norm, x = torch.nn.BatchNorm1d(2).half(), torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=FP16)
    with rehearse("cuda"):
        norm(x)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == pytest.approx([0.2, 0.4], abs=1e-3)


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex", "double", "integer"])
def test_other_tensors_are_left_alone(kind: str) -> None:
    with rehearse("cuda"):
        if kind == "meta":
            assert torch.empty(2, dtype=FP16, device="meta").exp().device.type == "meta"
        elif kind == "sparse":
            embedding = torch.nn.Embedding(5, 3, sparse=True).half()
            embedding(torch.tensor([1, 1, 2])).sum().backward()
            assert embedding.weight.grad is not None
            assert embedding.weight.grad.coalesce().values().tolist() == [[2.0] * 3, [1.0] * 3]
        elif kind == "complex":
            assert torch.complex(torch.ones(1, dtype=FP16), torch.ones(1, dtype=FP16)).dtype is torch.complex32
        elif kind == "double":
            assert (torch.ones(1, dtype=torch.float64) / 3).item() == 1 / 3
        else:
            assert torch.arange(3).sum().item() == 3


@pytest.mark.parametrize("mode", ["inference", "grad", "vmap", "double backward"])
def test_it_works_within_other_modes(mode: str) -> None:
    x = torch.tensor([0.5, 1.5], dtype=FP16)
    with rehearse("cuda"):
        if mode == "inference":
            with torch.inference_mode():
                assert torch.equal(x.exp(), x.float().exp().half())
        elif mode == "grad":
            assert torch.func.grad(lambda v: v.exp().sum())(x).dtype is FP16
        elif mode == "vmap":
            assert torch.equal(torch.func.vmap(torch.exp)(x), x.exp())
        else:
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(leaf.exp().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), leaf)
            assert torch.equal(second, x.float().exp().half())
