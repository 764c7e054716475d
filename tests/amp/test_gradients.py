from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from halfstep.amp.gradients import GradientsAside, scale_again_, unscale_

INF = float("inf")
NAN = float("nan")


def make(*gradients: Tensor | None) -> tuple[list[nn.Parameter], Optimizer]:
    parameters = []
    for gradient in gradients:
        dtype = torch.float32 if gradient is None else gradient.dtype
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters, SGD(parameters, lr=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
def test_gradients_are_divided_in_place_and_checked(dtype: torch.dtype, bad: float | None) -> None:
    values = torch.tensor([2048.0, -3.0 if bad is None else bad], dtype=dtype)
    (_, parameter), optimizer = make(None, values)
    found = unscale_([optimizer], scale=torch.tensor(1024.0), rechecks=False)
    assert parameter.grad is values
    assert values[0] == 2.0
    assert found.item() == (bad is not None)
    assert found.dtype is torch.float32
    if bad is None:
        assert values[1] == -3.0 / 1024


def test_halves_are_divided_in_fp32() -> None:
    # 2**-25 is no number of fp16: multiplied by it, all would be 0.
    values = torch.tensor([60000.0, 1024.0], dtype=torch.float16)
    _, optimizer = make(values)
    unscale_([optimizer], scale=torch.tensor(2.0**25), rechecks=False)
    assert torch.equal(values, (torch.tensor([60000.0, 1024.0]) * 2.0**-25).half())
    assert values[0] > 0


@pytest.mark.parametrize("rechecks", [False, True])
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 40000.0), (torch.float32, 2.0e38)])
def test_a_scale_below_one_may_make_an_infinity(dtype: torch.dtype, large: float, rechecks: bool) -> None:
    _, optimizer = make(torch.tensor([large, 1.0], dtype=dtype))
    assert unscale_([optimizer], scale=torch.tensor(0.25), rechecks=rechecks).item() == rechecks


def test_a_parameter_of_two_optimizers_is_divided_once() -> None:
    values = torch.tensor([8.0, 4.0])
    parameters, optimizer = make(values)
    unscale_([optimizer, SGD(parameters, lr=1.0)], scale=torch.tensor(4.0), rechecks=False)
    assert values.tolist() == [2.0, 1.0]


def test_without_gradients_nothing_is_found() -> None:
    _, optimizer = make(None)
    assert unscale_([optimizer], scale=torch.tensor(4.0), rechecks=True).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_multiplied_by_a_scale_that_is_no_number_of_fp16(dtype: torch.dtype) -> None:
    values = torch.tensor([0.25, 0.0], dtype=dtype)
    (_, parameter), optimizer = make(None, values)
    scale_again_(optimizer, scale=torch.tensor(2.0**17))
    assert parameter.grad is values
    assert values.tolist() == [2.0**15, 0.0]


@pytest.mark.parametrize(("before", "after"), [*product([None, 1.0], [None, 4.0])])
def test_gradients_are_put_aside_and_added(before: float | None, after: float | None) -> None:
    kept = None if before is None else torch.full((2,), before)
    new = None if after is None else torch.full((2,), after)
    (parameter,), optimizer = make(kept)
    aside = GradientsAside([optimizer])
    assert parameter.grad is None
    parameter.grad = new
    aside.add()
    if kept is None and new is None:
        assert parameter.grad is None
    else:
        assert parameter.grad is (kept if new is None else new)
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [(before or 0) + (after or 0)] * 2


def test_after_a_failure_they_are_as_before() -> None:
    (one, other), optimizer = make(torch.ones(2), None)
    kept = one.grad
    aside = GradientsAside([optimizer])
    one.grad = other.grad = torch.full((2,), 4.0)
    aside.restore()
    assert one.grad is kept
    assert other.grad is None


@pytest.mark.parametrize(("sparse_before", "sparse_after"), [*product([True, False], repeat=2)])
def test_sparse_gradients(sparse_before: bool, sparse_after: bool) -> None:
    def gradient(value: float, *, sparse: bool) -> Tensor:
        dense = torch.tensor([[value, 0.0], [0.0, 0.0]])
        return dense.to_sparse(1) if sparse else dense

    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = SGD([parameter], lr=1.0)
    parameter.grad = gradient(1.0, sparse=sparse_before)
    aside = GradientsAside([optimizer])
    parameter.grad = gradient(8.0, sparse=sparse_after)
    assert unscale_([optimizer], scale=torch.tensor(4.0), rechecks=True).item() == 0
    aside.add()
    assert parameter.grad.to_dense().tolist() == [[3.0, 0.0], [0.0, 0.0]]
