"""Whether updates change what is stored in half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from halfstep.policy import Policy
from halfstep.records import StuckTensor
from halfstep.replay.runs import Replay, StepCode
from halfstep.replay.updates import stuck_tensors, widen_optimizers

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = Policy.parse("fp32")


class Weights(nn.Module):
    """Weights of size one whose gradient is the loss's."""

    def __init__(self, dtype: torch.dtype, *, count: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=dtype))
        self.other = nn.Parameter(torch.ones(count))


def found(model: nn.Module, loss: Callable[[], Tensor], *optimizers: Optimizer, scale: float = 1.0) -> tuple[StuckTensor, ...]:
    before = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    with Replay(StepCode(model=model, parts=[(loss, 1.0)]), device=torch.device("cpu")) as replay:
        low, full = replay.traced(FP32, scale=scale), replay.widened(FP32)
        answer = stuck_tensors(replay, low, full, optimizers=optimizers)
    after: Any = (model.state_dict(), [each.state_dict() for each in optimizers])
    for name, value in before[0].items():
        assert value.dtype is after[0][name].dtype
        assert torch.equal(value, after[0][name])
    assert all(each.grad is None for each in model.parameters())
    assert [str(each) for each in before[1]] == [str(each) for each in after[1]]
    return answer


def weights(dtype: torch.dtype, rate: float, *, make: Callable[..., Optimizer] = SGD, scale: float = 1.0) -> tuple[StuckTensor, ...]:
    model = Weights(dtype)

    def loss() -> Tensor:
        return model.weight.float().sum() + model.other.sum()

    return found(model, loss, make(model.parameters(), lr=rate), scale=scale)


class TestParameters:
    @pytest.mark.parametrize(
        ("dtype", "rate", "stuck"),
        [
            (torch.bfloat16, 2.0**-10, 8),  # Half a unit below 1 is 2**-9.
            (torch.bfloat16, 2.0**-8, 0),
            (torch.float16, 2.0**-13, 8),
            (torch.float16, 2.0**-11, 0),
        ],
    )
    def test_an_update_below_half_a_unit_is_lost(self, dtype: torch.dtype, rate: float, stuck: int) -> None:
        name = "bfloat16" if dtype is torch.bfloat16 else "float16"
        assert weights(dtype, rate) == (StuckTensor(name="weight", dtype=name, stuck=stuck, elements=8),)

    def test_gradients_are_unscaled_first(self) -> None:
        for rate, stuck in ((2.0**-10, 8), (2.0**-8, 0)):
            assert [each.stuck for each in weights(torch.bfloat16, rate, scale=256.0)] == [stuck]

    def test_parameters_in_fp32_are_not_looked_at(self) -> None:
        assert weights(torch.float32, 1e-9) == ()

    def test_elements_that_would_not_move_do_not_count(self) -> None:
        model = Weights(torch.bfloat16)
        size = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 100.0, 100.0, 0.0])
        optimizer = SGD(model.parameters(), lr=2.0**-10)
        (one,) = found(model, lambda: torch.sum(model.weight.float() * size), optimizer)
        assert (one.stuck, one.elements, one.share) == (3, 5, 0.6)

    def test_nothing_that_moves_is_nothing_found(self) -> None:
        model = Weights(torch.bfloat16)
        assert found(model, lambda: torch.sum(model.weight.float() * 0), SGD(model.parameters(), lr=1.0)) == ()

    def test_without_an_optimizer_there_is_no_update(self) -> None:
        model = Weights(torch.bfloat16)
        assert found(model, lambda: model.weight.float().sum()) == ()

    @pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS])
    def test_any_optimizer(self, make: Callable[..., Optimizer]) -> None:
        (one,) = weights(torch.bfloat16, 2.0**-12, make=make)
        assert (one.stuck, one.elements) == (8, 8)

    def test_state_of_before_is_used_and_put_back(self) -> None:
        """A momentum in half that is large enough moves what the gradient alone does not."""
        model = Weights(torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=2.0**-10, momentum=1.0)
        model.weight.grad = torch.full((8,), 64.0, dtype=torch.bfloat16)
        optimizer.step()
        model.weight.grad = None
        assert optimizer.state[model.weight]["momentum_buffer"].dtype is torch.bfloat16
        with torch.no_grad():
            model.weight.fill_(1.0)
        (one,) = found(model, lambda: model.weight.float().sum(), optimizer)
        assert (one.stuck, one.elements) == (0, 8)

    def test_state_in_half_is_compared_with_the_same_in_fp32(self) -> None:
        """0.9 times -256 is -230 in bf16, to which 230 adds nothing, and -230.4 in fp32."""
        model = Weights(torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer.state[model.weight]["momentum_buffer"] = torch.full((8,), -256.0, dtype=torch.bfloat16)
        (one,) = found(model, lambda: model.weight.float().sum() * 230, optimizer)
        assert (one.stuck, one.elements) == (8, 8)

    def test_hooks_are_not_called(self) -> None:
        model, calls = Weights(torch.bfloat16), []
        optimizer = SGD(model.parameters(), lr=1e-5)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        assert found(model, lambda: model.weight.float().sum(), optimizer)
        assert calls == []

    def test_the_one_with_the_largest_share_comes_first(self) -> None:
        values = {"a": 1e-3, "b": 1.0}
        model = nn.ParameterDict({name: nn.Parameter(torch.full((2,), each, dtype=torch.bfloat16)) for name, each in values.items()})
        stuck = found(model, lambda: torch.sum((model["a"] + model["b"]).float()), SGD(model.parameters(), lr=1e-4))
        assert [each.name for each in stuck] == ["b", "a"]


class Average(nn.Module):
    """A running mean, stored in half."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4, dtype=dtype))

    def loss(self) -> Tensor:
        with torch.no_grad():
            mean: Any = self.mean
            mean.lerp_(torch.tensor([3.0, 3.0, 300.0, 1.0]).to(mean.dtype), 2.0**-11)
        return self.weight.sum()


class TestBuffers:
    def test_a_running_mean_that_stands_still(self) -> None:
        model = Average(torch.bfloat16)
        assert found(model, model.loss) == (StuckTensor(name="mean", dtype="bfloat16", stuck=2, elements=3),)

    def test_in_fp32_it_moves(self) -> None:
        model = Average(torch.float32)
        assert found(model, model.loss) == ()


def test_state_in_half_is_widened_and_nothing_else() -> None:
    model = Weights(torch.bfloat16, count=2)
    optimizer = SGD(model.parameters(), lr=0.1)
    entry = optimizer.state[model.weight]
    entry.update(half=torch.ones(2).half(), low=torch.ones(2).bfloat16(), full=torch.ones(2), step=torch.tensor(3), number=2)
    widen_optimizers([optimizer])
    dtypes = {name: value.dtype for name, value in entry.items() if isinstance(value, Tensor)}
    assert dtypes == {"half": torch.float32, "low": torch.float32, "full": torch.float32, "step": torch.int64}
    assert entry["number"] == 2
