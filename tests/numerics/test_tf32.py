"""Rounding to TF32, against float64, and products of matrices that are rounded so."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.numerics import rehearse
from halfstep.numerics.tf32 import TF32_OPERATIONS, round_to_tf32

ATEN = torch.ops.aten


def reference(value: float) -> float:
    """The nearest number with 10 bits after the leading one; half-way cases go away from zero."""
    if not math.isfinite(value) or value == 0:
        return value
    exponent = max(math.frexp(abs(value))[1], -125)  # Below that, numbers of fp32 are subnormal, and so are those of TF32.
    unit = 2.0 ** (exponent - 11)
    rounded = math.floor(abs(value) / unit + 0.5) * unit
    return math.copysign(math.inf if rounded >= 2.0**128 else rounded, value)


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


special = st.sampled_from([0, -(2**31), 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x7F800000, 0x7FC00000, 0x3F801000])
patterns = st.integers(-(2**31), 2**31 - 1) | special


@given(st.lists(patterns, min_size=1, max_size=64))
def test_rounding_is_that_of_float64(drawn: list[int]) -> None:
    x = torch.tensor(drawn, dtype=torch.int32).view(torch.float32)
    expected = torch.tensor([reference(value) for value in x.tolist()], dtype=torch.float64).float()
    rounded = round_to_tf32(x)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert bits(rounded[~x.isnan()]) == bits(expected[~x.isnan()])


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "no dimension", "empty", "channels last"])
def test_any_layout_is_rounded(kind: str) -> None:
    x = torch.randn(2, 4, 6, 6)
    views = {
        "transposed": x.transpose(0, 3),
        "expanded": x[0, 0, 0].expand(3, 6),
        "sliced": x[:, ::2, 1:5:3],
        "no dimension": x[0, 0, 0, 0],
        "empty": x[:0],
        "channels last": x.contiguous(memory_format=torch.channels_last),
    }
    rounded = round_to_tf32(views[kind])
    assert rounded.shape == views[kind].shape
    assert bits(rounded.contiguous().flatten()) == bits(round_to_tf32(views[kind].contiguous().flatten()))


def test_rounding_twice_is_rounding_once() -> None:
    once = round_to_tf32(torch.randn(1000))
    assert torch.equal(round_to_tf32(once), once)


def r(x: Tensor) -> Tensor:
    return round_to_tf32(x)


A, B, M, V = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((4, 6), (6, 5), (4, 5), (6,)))
BATCH_A, BATCH_B, BATCH_M = A.expand(2, 4, 6).mul(1.1), B.expand(2, 6, 5).mul(0.9), M.expand(2, 4, 5).clone()
ROUNDED: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "mm": (lambda: A @ B, lambda: r(A) @ r(B)),
    "bmm": (lambda: BATCH_A @ BATCH_B, lambda: r(BATCH_A) @ r(BATCH_B)),
    "addmm": (lambda: torch.addmm(M, A, B, beta=0.5, alpha=2), lambda: torch.addmm(M, r(A), r(B), beta=0.5, alpha=2)),
    "baddbmm": (lambda: torch.baddbmm(BATCH_M, BATCH_A, BATCH_B), lambda: torch.baddbmm(BATCH_M, r(BATCH_A), r(BATCH_B))),
    "addbmm": (lambda: torch.addbmm(M, BATCH_A, BATCH_B), lambda: torch.addbmm(M, r(BATCH_A), r(BATCH_B))),
    "addmm in place": (lambda: M.clone().addmm_(A, B), lambda: M.clone().addmm_(r(A), r(B))),
    "baddbmm in place": (lambda: BATCH_M.clone().baddbmm_(BATCH_A, BATCH_B), lambda: BATCH_M.clone().baddbmm_(r(BATCH_A), r(BATCH_B))),
    "addbmm in place": (lambda: M.clone().addbmm_(BATCH_A, BATCH_B), lambda: M.clone().addbmm_(r(BATCH_A), r(BATCH_B))),
    "mm, out": (lambda: torch.mm(A, B, out=torch.empty(4, 5)), lambda: r(A) @ r(B)),
    "addmm, out": (lambda: torch.addmm(M, A, B, out=torch.empty(4, 5)), lambda: torch.addmm(M, r(A), r(B))),
    "bmm, out": (lambda: torch.bmm(BATCH_A, BATCH_B, out=torch.empty(2, 4, 5)), lambda: r(BATCH_A) @ r(BATCH_B)),
    "linear": (lambda: F.linear(A, B.t(), M[0]), lambda: F.linear(r(A), r(B).t(), M[0])),
    "einsum": (lambda: torch.einsum("ij,jk->ik", A, B), lambda: torch.einsum("ij,jk->ik", r(A), r(B))),
}
UNTOUCHED: dict[str, Callable[[], Tensor]] = {
    "mv": lambda: torch.mv(A, V),
    "dot": lambda: torch.dot(V, V),
    "exp": A.exp,
    "sum": A.sum,
    "product of elements": lambda: A * A,
    "layer norm": lambda: F.layer_norm(A, (6,)),
    "softmax": lambda: A.softmax(-1),
    "float64": lambda: A.double() @ B.double(),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_products_are_those_of_rounded_matrices(name: str) -> None:
    run, expected = ROUNDED[name]
    with rehearse("cuda", tf32=True):
        result = run()
    assert torch.equal(result, expected())
    assert not torch.equal(result, run())


@pytest.mark.parametrize("name", UNTOUCHED)
def test_nothing_else_is_rounded(name: str) -> None:
    with rehearse("cuda", tf32=True):
        result = UNTOUCHED[name]()
    assert torch.equal(result, UNTOUCHED[name]())


def test_nothing_is_rounded_where_it_is_not_asked_for() -> None:
    with rehearse("cuda"):
        result = A @ B
    assert torch.equal(result, A @ B)


def test_a_linear_layer_backward() -> None:
    x, weight, bias = A.clone().requires_grad_(), B.t().contiguous().requires_grad_(), M[0].clone().requires_grad_()
    with rehearse("cuda", tf32=True):
        torch.autograd.backward(F.linear(x, weight, bias), M)
    assert x.grad is not None
    assert torch.equal(x.grad, r(M) @ r(weight.detach()))
    assert weight.grad is not None
    assert torch.equal(weight.grad, r(M).t() @ r(A))
    assert bias.grad is not None
    assert torch.equal(bias.grad, M.sum(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_forward_and_backward(transposed: bool) -> None:
    x, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(4)
    convolve: Callable[..., Tensor] = F.conv_transpose2d if transposed else F.conv2d
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    with rehearse("cuda", tf32=True):
        out = convolve(*leaves)
        gradient = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, gradient)
    assert torch.equal(out, convolve(r(x), r(weight), bias))
    rounded = [r(x).requires_grad_(), r(weight).requires_grad_()]
    expected = torch.autograd.grad(convolve(*rounded, bias), rounded, r(gradient))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(found[:2], expected, strict=True))
    # The gradient of the bias is a sum, not a product of matrices.
    assert torch.equal(found[2], gradient.sum((0, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_in_half_are_as_without_it(dtype: torch.dtype) -> None:
    results = []
    for tf32 in (False, True):
        weight = B.t().contiguous().requires_grad_()
        with rehearse("cuda", dtype, tf32=tf32), torch.autocast("cpu", dtype=dtype):
            out = F.linear(A, weight)
            torch.autograd.backward(out.float().square().sum())
        assert weight.grad is not None
        results.append((out, weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_table_has_each_form_of_a_product() -> None:
    for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm"):
        packet = getattr(ATEN, name)
        assert {packet.default, packet.out} <= TF32_OPERATIONS.keys()
