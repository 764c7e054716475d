from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from halfstep.scaler import LossScaler
from tests.scaler.loops import INF, OPTIMIZERS, backward, iterate, same, snapshot, weights


def test_without_any_gradient_a_step_is_the_optimizers() -> None:
    (weight,) = weights()
    scaler, made = LossScaler("cpu", init_scale=8.0), OPTIMIZERS["momentum"]([weight])
    calls: list[int] = []
    made.register_step_post_hook(lambda *_: calls.append(1))
    scaler.unscale_(made)
    scaler.unscale_(made)
    scaler.step(made)
    scaler.update()
    assert (len(calls), weight.tolist()) == (1, [1.0] * 3)
    assert (scaler.stats().steps, scaler.stats().skips, scaler.get_scale()) == (1, 0, 8.0)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
def test_parameters_of_no_size_train_along(optimizer: str) -> None:
    parameters = weights(0, 2)
    scaler, made = LossScaler("cpu"), OPTIMIZERS[optimizer](parameters)
    for factor in (1.0, 1.0, INF):
        iterate(scaler, made, factor)
    assert scaler.stats().skips == 1
    assert (parameters[1] < 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_other_numbers_train(optimizer: str, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    scaler, made = LossScaler("cpu", init_scale=8.0), OPTIMIZERS[optimizer]([weight])
    for factor in (1.0, INF, 1.0):
        made.zero_grad()
        scaler.scale((weight * factor).abs().sum()).backward()
        scaler.step(made)
        scaler.update()
    assert (scaler.stats().skips, scaler.get_scale()) == (1, 4.0)
    assert weight.isfinite().all()
    assert (weight.abs() < 1).all()


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    parameters = weights(3, 2)
    scaler, made = LossScaler("cpu", init_scale=8.0), OPTIMIZERS["adamw-fused"](parameters)
    for seen, factor in ((1, 1.0), (2, INF), (2, 1.0), (2, INF)):
        made.zero_grad()
        before = snapshot(made)
        backward(scaler, parameters[:seen], factor)
        scaler.step(made)
        scaler.update()
        assert same(snapshot(made), before) == (factor == INF)
    assert scaler.stats().skips == 2


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype, fused: bool) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    scaler = LossScaler("cpu", init_scale=8.0, hysteresis=1)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.0] * 3
    assert scaler.stats().skips == 1
