"""What a step changes, kept and put back bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.randomness import RandomState
from halfstep.replay.state import StepState, TrainingState

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def step_state(model: nn.Module, *, random: RandomState | None = None) -> StepState:
    return StepState(model, parameters=[*model.parameters()], random=random)


class TestRandomNumbers:
    def test_those_of_python_numpy_and_torch_begin_anew(self) -> None:
        state = step_state(nn.Linear(1, 1))
        first = drawn()
        state.start_over()
        assert drawn() == first
        state.put_back()
        assert drawn() == first

    def test_a_state_of_before_is_gone_back_to_and_what_goes_on_stays(self) -> None:
        model, before = nn.Linear(1, 1), RandomState.capture()
        first = drawn()
        here = RandomState.capture()
        following = drawn()
        here.restore()
        state = step_state(model, random=before)
        assert drawn() == first
        state.start_over()
        assert drawn() == first
        state.put_back()
        assert drawn() == following


class TestBuffers:
    def test_statistics_of_norms_come_back(self) -> None:
        norm = nn.BatchNorm1d(2)
        norm(torch.randn(4, 2))
        buffers = dict(norm.named_buffers())
        before = {name: each.clone() for name, each in buffers.items()}
        state = step_state(norm)
        for _ in range(2):
            norm(torch.full((4, 2), torch.nan))
            assert norm.num_batches_tracked is not None
            assert norm.num_batches_tracked.item() == 2
            state.start_over()
            for name, each in norm.named_buffers():
                assert each is buffers[name]
                assert torch.equal(each, before[name])

    def test_a_buffer_that_was_replaced_is_the_one_of_before(self) -> None:
        norm: Any = nn.BatchNorm1d(2)
        kept = norm.running_mean
        state = step_state(norm)
        norm.running_mean = torch.ones(2)
        state.put_back()
        assert norm.running_mean is kept
        assert kept.tolist() == [0.0, 0.0]

    def test_a_buffer_that_was_none_is_none_again(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("cache", None)
        state = step_state(module)
        module.cache = torch.ones(2)
        state.start_over()
        assert module.cache is None
        assert "cache" in module._buffers

    def test_one_that_became_none_is_there_again(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("cache", torch.ones(2))
        kept = module.cache
        state = step_state(module)
        module.cache = None
        state.put_back()
        assert module.cache is kept

    def test_one_of_another_shape_is_of_its_own_again(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("cache", torch.ones(2))
        buffer: Any = module.cache
        state = step_state(module)
        buffer.resize_(5).fill_(3)
        state.put_back()
        assert module.cache is buffer
        assert buffer.tolist() == [1.0, 1.0]

    def test_an_expanded_buffer_that_has_not_changed_is_left_alone(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("table", torch.ones(1).expand(4))
        state = step_state(module)
        state.start_over()
        state.put_back()
        table: Any = module.table
        assert (table.tolist(), table.stride()) == ([1.0] * 4, (0,))

    def test_nan_and_integers_come_back(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("values", torch.tensor([torch.nan, -0.0]))
        module.register_buffer("count", torch.tensor(2**40 + 1))
        state = step_state(module)
        values: Any = module.values
        values.fill_(3)
        module.count.add_(1)
        state.put_back()
        assert values.isnan().tolist() == [True, False]
        assert values[1].signbit()
        assert int(module.count) == 2**40 + 1

    def test_the_sign_of_a_zero_comes_back(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("values", torch.tensor([-0.0]))
        state = step_state(module)
        module.values.zero_()
        state.put_back()
        assert bool(module.values.signbit())

    def test_an_expanded_buffer_of_nan_is_left_alone(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("table", torch.tensor([torch.nan]).expand(4))
        step_state(module).put_back()
        assert bool(module.table.isnan().all())

    def test_one_that_is_stored_in_another_dtype_for_now_stays_so(self) -> None:
        module: Any = nn.Module()
        module.register_buffer("mean", torch.tensor([0.5], dtype=torch.float16))
        state = step_state(module)
        buffer: Any = module.mean
        kept = buffer.data
        buffer.data = torch.tensor([9.0])
        state.start_over()
        assert (buffer.dtype, buffer.tolist()) == (torch.float32, [0.5])
        buffer.data = kept
        state.put_back()
        assert (buffer.dtype, buffer.tolist()) == (torch.float16, [0.5])

    def test_buffers_of_inner_and_shared_modules(self) -> None:
        inner = nn.BatchNorm1d(2)
        model = nn.Sequential(inner, nn.Sequential(inner, nn.BatchNorm1d(2)))
        state = step_state(model)
        model(torch.randn(4, 2))
        state.put_back()
        assert [int(each) for name, each in model.named_buffers() if name.endswith("tracked")] == [0, 0]


class TestGradients:
    def test_they_are_away_meanwhile_and_the_same_objects_afterwards(self) -> None:
        layer = nn.Linear(2, 2)
        gradient = torch.full((2, 2), 3.0)
        layer.weight.grad = gradient

        def gradients() -> list[Tensor | None]:
            return [layer.weight.grad, layer.bias.grad]

        state = step_state(layer)
        for _ in range(2):
            assert gradients() == [None, None]
            layer(torch.ones(1, 2)).sum().backward()
            assert [each is not None and bool((each == 1).all()) for each in gradients()] == [True, True]
            state.start_over()
        layer(torch.ones(1, 2)).sum().backward()
        state.put_back()
        assert gradients()[0] is gradient
        assert gradients()[1] is None
        assert gradient.tolist() == [[3.0, 3.0]] * 2


Make = Callable[[list[nn.Parameter]], Optimizer]


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[:1], "lr": 0.3, "weight_decay": 0.1}, {"params": parameters[1:]}]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1),
    "sgd momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd fused": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda each: torch.optim.Adam(each, lr=0.1),
    "adam amsgrad": lambda each: torch.optim.Adam(each, lr=0.1, amsgrad=True),
    "adamw fused": lambda each: torch.optim.AdamW(each, lr=0.1, fused=True),
    "adamw foreach": lambda each: torch.optim.AdamW(each, lr=0.1, foreach=True),
    "adam with a tensor as learning rate": lambda each: torch.optim.Adam(each, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda each: torch.optim.Adagrad(each, lr=0.1),
    "rmsprop": lambda each: torch.optim.RMSprop(each, lr=0.1, momentum=0.5, centered=True),
    "adadelta": lambda each: torch.optim.Adadelta(each, lr=0.1),
    "nadam": lambda each: torch.optim.NAdam(each, lr=0.1),
    "rprop": lambda each: torch.optim.Rprop(each, lr=0.1),
    "lbfgs": lambda each: torch.optim.LBFGS(each, lr=0.1, max_iter=3, history_size=2),
    "two groups": two_groups,
}


class Training:
    """A small model and what trains it."""

    def __init__(self, make: Make) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = make([*self.model.parameters()])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            x = torch.randn(5, 3)

            def closure(x: Tensor = x) -> Tensor:
                self.optimizer.zero_grad()
                loss: Tensor = self.model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            closure()
            # What the class itself steps with; LBFGS takes nothing else.
            self.optimizer.step(closure)  # type: ignore[arg-type]

    def state(self) -> TrainingState:
        return TrainingState([*self.model.parameters()], optimizers=[self.optimizer])

    def snapshot(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{path}/{name}")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from leaves(each, f"{path}/{place}")
    else:
        yield path, value


def assert_same(one: Any, other: Any) -> None:
    first, second = dict(leaves(one)), dict(leaves(other))
    assert list(first) == list(second)
    for path, value in first.items():
        if isinstance(value, Tensor):
            assert value.dtype == second[path].dtype
            assert torch.equal(value, second[path]), path
        else:
            assert value == second[path], path


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestTraining:
    @pytest.mark.parametrize("before", [0, 2])
    def test_all_is_put_back_bit_for_bit(self, name: str, before: int) -> None:
        training = Training(OPTIMIZERS[name])
        training.step(before)
        snapshot, state = training.snapshot(), training.state()
        data = [each.data_ptr() for each in training.model.parameters()]
        training.step(3)
        assert not torch.equal(training.model[0].weight, snapshot[0]["0.weight"])  # type: ignore[arg-type]
        state.put_back()
        assert_same(training.snapshot(), snapshot)
        assert [each.data_ptr() for each in training.model.parameters()] == data

    def test_training_goes_on_as_if_nothing_had_been(self, name: str) -> None:
        random = RandomState.capture()
        training = Training(OPTIMIZERS[name])
        training.step(4)
        expected = training.snapshot()
        random.restore()
        training = Training(OPTIMIZERS[name])
        training.step(2)
        state, here = training.state(), RandomState.capture()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.fill_(torch.inf)
        training.step(2)
        state.put_back()
        here.restore()
        training.step(2)
        assert_same(training.snapshot(), expected)


class TestOptimizers:
    def test_the_objects_of_the_state_are_the_same(self) -> None:
        """A graph that was captured, or a scheduler, holds on to them."""
        training = Training(lambda each: torch.optim.Adam(each, lr=torch.tensor(0.1), foreach=False))
        training.step()
        entries = {key: (entry, dict(entry)) for key, entry in training.optimizer.state.items()}
        groups, rate = [*training.optimizer.param_groups], training.optimizer.param_groups[0]["lr"]
        state = training.state()
        training.step()
        training.optimizer.param_groups[0]["lr"] = 7.0
        rate.fill_(3.0)
        state.put_back()
        assert all(one is other for one, other in zip(training.optimizer.param_groups, groups, strict=True))
        assert training.optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.1)
        for key, (entry, values) in entries.items():
            assert training.optimizer.state[key] is entry
            assert all(entry[name] is value for name, value in values.items())

    def test_groups_that_were_changed_meanwhile(self) -> None:
        training = Training(lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9))
        group = training.optimizer.param_groups[0]
        group["extra"] = {"list": [1, 2], "tuple": (1.0,)}
        state = training.state()
        group["lr"], group["momentum"], group["new"] = 5.0, 0.1, "x"
        group["extra"]["list"].append(3)
        del group["nesterov"]
        state.put_back()
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.9, False)
        assert "new" not in group
        assert group["extra"] == {"list": [1, 2], "tuple": (1.0,)}
        assert len(group["params"]) == 4

    def test_the_betas_of_adam_stay_a_tuple(self) -> None:
        training = Training(lambda each: torch.optim.Adam(each, betas=(0.8, 0.9)))
        state = training.state()
        training.optimizer.param_groups[0]["betas"] = (0.1, 0.2)
        state.put_back()
        assert training.optimizer.param_groups[0]["betas"] == (0.8, 0.9)

    def test_plain_attributes_of_an_optimizer_are_put_back(self) -> None:
        """Such as a count of steps that somebody keeps there."""
        training = Training(lambda each: torch.optim.SGD(each, lr=0.1))
        optimizer: Any = training.optimizer
        optimizer.calls = 3
        state = training.state()
        optimizer.calls = 9
        state.put_back()
        assert optimizer.calls == 3

    def test_parameters_in_half_come_back_from_fp32(self) -> None:
        layer = nn.Linear(2, 2).half()
        weight, data = layer.weight, layer.weight.data
        before = data.clone()
        state = TrainingState([weight], optimizers=[])
        weight.data = torch.zeros(2, 2)
        state.put_back()
        assert weight.dtype is torch.float16
        assert weight.data_ptr() == data.data_ptr()
        assert torch.equal(weight, before)

    def test_state_that_was_widened_meanwhile_is_in_half_again(self) -> None:
        layer = nn.Linear(2, 2).half()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(1, 2).half()).sum().backward()
        optimizer.step()
        kept = optimizer.state[layer.weight]["momentum_buffer"]
        state = TrainingState([*layer.parameters()], optimizers=[optimizer])
        optimizer.state[layer.weight]["momentum_buffer"] = kept.float() * 3
        state.put_back()
        assert optimizer.state[layer.weight]["momentum_buffer"] is kept
        assert kept.tolist() == [[1.0, 1.0]] * 2

    def test_the_sign_of_a_zero_comes_back(self) -> None:
        weight = nn.Parameter(torch.tensor([-0.0]))
        state = TrainingState([weight], optimizers=[])
        with torch.no_grad():
            weight.zero_()
        state.put_back()
        assert bool(weight.signbit())

    def test_gradients_and_versions_are_no_part_of_it(self) -> None:
        training = Training(lambda each: torch.optim.SGD(each, lr=0.1))
        state = training.state()
        versions = [each._version for each in training.model.parameters()]
        state.put_back()
        assert [each._version for each in training.model.parameters()] == versions, "what has not changed is not written to"


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), before=st.integers(0, 3), meanwhile=st.integers(0, 3), seed=st.integers(0, 1000))
def test_any_optimizer_after_any_steps(name: str, before: int, meanwhile: int, seed: int) -> None:
    torch.manual_seed(seed)
    training = Training(OPTIMIZERS[name])
    training.step(before)
    snapshot, state = training.snapshot(), training.state()
    for _ in range(2):  # It may be put back more than once.
        training.step(meanwhile)
        state.put_back()
        assert_same(training.snapshot(), snapshot)
