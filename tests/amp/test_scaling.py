from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from halfstep import amp
from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError

INF = float("inf")


class Weight(nn.Module):
    """The gradient of its output is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, factor: Tensor) -> Tensor:
        return self.weight * factor


def start(*, optimizers: int = 1, **arguments: Any) -> tuple[Weight, list[Optimizer]]:
    model = Weight()
    listed: list[Optimizer] = [SGD(model.parameters(), lr=1.0) for _ in range(optimizers)]
    amp.initialize(model, listed, **{"opt_level": "O1", "loss_scale": 8.0, **arguments})
    return model, listed


def backward(model: Weight, factor: float, optimizers: Any, **arguments: Any) -> None:
    with amp.scale_loss(model(torch.tensor(factor)), optimizers, **arguments) as scaled_loss:
        scaled_loss.backward()


def grad(model: Weight) -> float:
    assert model.weight.grad is not None
    return model.weight.grad.item()


def scale(loss_id: int = 0) -> float:
    value: float = amp.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"]
    return value


def test_before_initialize() -> None:
    model = Weight()
    with pytest.raises(StepOrderError, match=r"amp.scale_loss was called before amp.initialize. Call model, optimizer = amp.initialize"):
        backward(model, 1.0, SGD(model.parameters(), lr=1.0))


def test_an_optimizer_that_was_not_initialized() -> None:
    model, _ = start()
    with pytest.raises(StepOrderError, match=r"This SGD was not passed to amp.initialize. Call model, optimizer = amp.initialize"):
        backward(model, 1.0, SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("optimizers", [None, 1, "sgd", [None]])
def test_what_is_no_optimizer(optimizers: object) -> None:
    model, _ = start()
    with pytest.raises(InvalidTypeError, match="takes an optimizer or a list of optimizers"):
        backward(model, 1.0, optimizers)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_loss_that_is_no_tensor(level: str) -> None:
    _, optimizers = start(opt_level=level, loss_scale=None)
    with pytest.raises(InvalidTypeError, match=r"takes a tensor, not a float"), amp.scale_loss(1.0, optimizers):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("loss_id", [-1, 2, 0.0, True])
def test_a_loss_that_there_is_not(loss_id: Any) -> None:
    model, optimizers = start(num_losses=2)
    with pytest.raises(ConfigurationError, match=r"with num_losses=2, allowed are whole numbers from 0 to 1"):
        backward(model, 1.0, optimizers, loss_id=loss_id)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_optimizers_step_or_skip_together(kind: type) -> None:
    model, optimizers = start(optimizers=2, loss_scale="dynamic")
    backward(model, INF, kind(optimizers))
    for optimizer in optimizers:
        optimizer.step()
    assert model.weight.item() == 0
    model.zero_grad()
    backward(model, 1.0, kind(optimizers))
    assert grad(model) == 1.0
    for optimizer in optimizers:
        optimizer.step()
    assert model.weight.item() == -2.0
    assert scale() == 2.0**15


def test_gradients_of_losses_with_different_scales_add_up() -> None:
    model, [optimizer] = start(num_losses=2, loss_scale="dynamic")
    amp.load_state_dict({f"loss_scaler{number}": {"loss_scale": value, "unskipped": 0} for number, value in enumerate((4.0, 32.0))})
    backward(model, 1.0, optimizer, loss_id=0)
    backward(model, 2.0, optimizer, loss_id=1)
    backward(model, 4.0, optimizer, loss_id=0)
    assert grad(model) == 7.0


@pytest.mark.parametrize("order", [(1.0, INF), (INF, 1.0)])
def test_an_overflow_of_one_of_two_losses_skips_the_step_and_moves_only_its_scale(order: tuple[float, float]) -> None:
    model, [optimizer] = start(num_losses=2, loss_scale="dynamic")
    for loss_id, factor in enumerate(order):
        backward(model, factor, optimizer, loss_id=loss_id)
    optimizer.step()
    assert model.weight.item() == 0
    assert [scale(0), scale(1)] == [2.0**15 if factor == INF else 2.0**16 for factor in order]


def test_gradients_that_stay_scaled_are_added_to() -> None:
    model, [optimizer] = start()
    backward(model, 1.0, optimizer, delay_unscale=True)
    assert grad(model) == 8.0
    backward(model, 2.0, optimizer, delay_unscale=True)
    assert grad(model) == 24.0
    with pytest.raises(StepOrderError, match="had delay_unscale=True"):
        optimizer.step()
    backward(model, 4.0, optimizer)
    assert grad(model) == 7.0
    optimizer.step()
    assert model.weight.item() == -7.0


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_gradients_that_are_unscaled_already_and_others_that_stay_scaled(level: str) -> None:
    model, [optimizer] = start(opt_level=level, loss_scale=2.0**15)
    backward(model, 0.125, optimizer)
    backward(model, 0.25, optimizer, delay_unscale=True)
    assert grad(model) == 0.375 * 2.0**15
    backward(model, 0.5, optimizer)
    assert grad(model) == 0.875


def test_gradients_that_stay_scaled_and_a_scale_that_moved() -> None:
    model, another = Weight(), Weight()
    listed = [SGD(each.parameters(), lr=1.0) for each in (model, another)]
    _, [one, other] = amp.initialize([model, another], listed)
    backward(model, 1.0, one, delay_unscale=True)
    backward(another, INF, other)
    with pytest.raises(StepOrderError, match="are multiplied by 65536, and the loss scale is now 32768"):
        backward(model, 1.0, one)
    one.zero_grad()
    backward(model, 1.0, one)  # Without gradients there is nothing in the way.
    assert grad(model) == 1.0


def test_an_overflow_that_is_to_be_checked_later() -> None:
    model, [optimizer] = start(loss_scale="dynamic")
    backward(model, INF, optimizer, delay_overflow_check=True)
    assert scale() == 2.0**16
    backward(model, 1.0, optimizer, delay_overflow_check=True)
    backward(model, 1.0, optimizer)
    assert scale() == 2.0**15
    optimizer.step()
    assert model.weight.item() == 0
    model.zero_grad()
    backward(model, 1.0, optimizer)
    optimizer.step()
    assert model.weight.item() == -1
    assert scale() == 2.0**15


def fail(model: Weight, optimizer: Optimizer) -> None:
    with amp.scale_loss(model(torch.tensor(2.0)), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise MemoryError


def test_a_backward_pass_that_fails_leaves_gradients_as_they_were() -> None:
    model, [optimizer] = start()
    backward(model, 1.0, optimizer)
    with pytest.raises(MemoryError):
        fail(model, optimizer)
    assert grad(model) == 1.0
    backward(model, 2.0, optimizer)
    assert grad(model) == 3.0


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_at_scale_one_without_master_weights_nothing_is_checked_as_in_apex(level: str) -> None:
    model, [optimizer] = start(opt_level=level, loss_scale=None)
    backward(model, 1.0, optimizer)
    backward(model, INF, optimizer)
    assert grad(model) == INF
    optimizer.step()
    assert model.weight.item() == -INF


@pytest.mark.parametrize(("level", "static"), [("O2", 1.0), ("O1", 8.0), ("O3", 8.0), ("O0", 8.0)])
def test_any_other_static_scale_skips_what_is_not_finite(level: str, static: float) -> None:
    model, [optimizer] = start(opt_level=level, loss_scale=static)
    backward(model, INF, optimizer)
    optimizer.step()
    assert model.weight.item() == 0
    assert scale() == static


def test_a_dynamic_scale_of_one_skips_it_too() -> None:
    model, [optimizer] = start(loss_scale="dynamic", max_loss_scale=1.0)
    backward(model, INF, optimizer)
    optimizer.step()
    assert model.weight.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_a_loss_in_half_is_scaled_in_fp32(loss_scale: float, dtype: torch.dtype) -> None:
    _, optimizers = start(loss_scale=loss_scale)
    with amp.scale_loss(torch.tensor(60000.0, dtype=dtype), optimizers) as scaled_loss:
        assert scaled_loss.item() == torch.tensor(60000.0, dtype=dtype).item() * loss_scale
        assert scaled_loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


@given(st.lists(st.booleans(), max_size=40), st.sampled_from([None, 2.0**10, 2.0**-3]), st.sampled_from([2.0**24, 2.0**17]))
def test_the_scale_moves_as_apexs(overflows: list[bool], floor: float | None, ceiling: float) -> None:
    model, [optimizer] = start(loss_scale="dynamic", min_loss_scale=floor, max_loss_scale=ceiling)
    expected, unskipped = 2.0**16, 1990
    amp.load_state_dict({"loss_scaler0": {"loss_scale": expected, "unskipped": unskipped}})
    for overflow in overflows:
        backward(model, INF if overflow else 1.0, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if overflow:
            expected, unskipped = max(expected / 2, 1.0 if floor is None else floor), 0
        else:
            unskipped += 1
        if unskipped == 2000:
            expected, unskipped = min(expected * 2, ceiling), 0
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": expected, "unskipped": unskipped}}


def test_the_master_parameters_are_those_of_the_optimizer() -> None:
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    optimizer = SGD(groups, lr=1.0)
    assert [id(each) for each in amp.master_params(optimizer)] == [id(each) for each in parameters]
