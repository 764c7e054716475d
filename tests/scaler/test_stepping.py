from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.errors import ConfigurationError
from halfstep.scaler.stepping import leaves_verdict_on_device, refuse_closure, step_on_device
from tests.scaler.loops import FUSED, INF, OPTIMIZERS, same, snapshot, weights


def started(name: str) -> tuple[Optimizer, nn.Parameter]:
    """An optimizer after its first step, with a new gradient."""
    (weight,) = weights()
    optimizer = OPTIMIZERS[name]([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer, weight


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_decide_on_the_device(name: str) -> None:
    optimizer, _ = started(name)
    assert leaves_verdict_on_device(optimizer) is (name in FUSED)


@pytest.mark.parametrize("name", FUSED)
def test_until_there_is_state_the_host_decides(name: str) -> None:
    (weight,) = weights()
    optimizer = OPTIMIZERS[name]([weight])
    weight.grad = torch.ones(3)
    assert leaves_verdict_on_device(optimizer) is (name in ("sgd-fused", "adagrad-fused"))


@pytest.mark.parametrize("name", ["adam-fused", "adamw-fused"])
def test_a_parameter_that_comes_late_is_waited_for(name: str) -> None:
    parameters = weights(3, 2)
    optimizer = OPTIMIZERS[name](parameters)
    for seen in (1, 2):
        for parameter in parameters[:seen]:
            parameter.grad = torch.ones_like(parameter)
        assert not leaves_verdict_on_device(optimizer)
        optimizer.step()
        assert leaves_verdict_on_device(optimizer)
    (added,) = weights(4)
    optimizer.add_param_group({"params": [added]})
    assert leaves_verdict_on_device(optimizer), "without a gradient it takes no part in the step"
    added.grad = torch.ones(4)
    assert not leaves_verdict_on_device(optimizer)


def test_each_group_has_a_momentum_of_its_own() -> None:
    first, second = weights(3, 2)
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=True)
    first.grad = torch.ones(3)
    assert leaves_verdict_on_device(optimizer)
    second.grad = torch.ones(2)
    assert not leaves_verdict_on_device(optimizer)


def test_momentum_without_a_value_is_no_state() -> None:
    optimizer, weight = started("momentum-fused")
    optimizer.state[weight]["momentum_buffer"] = None
    assert not leaves_verdict_on_device(optimizer)


def hook_after(optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def hook_before(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def replace_step(optimizer: Optimizer) -> None:
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def schedule_and_wrap_step(optimizer: Optimizer) -> None:
    LambdaLR(optimizer, lambda _: 1.0)
    inner = optimizer.step

    @functools.wraps(inner)  # It copies the scheduler's mark, too.
    def step(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("observe", [hook_after, hook_before, replace_step, schedule_and_wrap_step])
@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused"])
def test_who_observes_steps_must_not_see_one_that_did_not_happen(name: str, observe: Callable[[Optimizer], None]) -> None:
    optimizer, _ = started(name)
    observe(optimizer)
    assert not leaves_verdict_on_device(optimizer)


def test_a_derived_class_may_observe_its_steps() -> None:
    class Averaged(torch.optim.SGD):
        averages = 0

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.averages += 1

    class Renamed(torch.optim.SGD):
        pass

    (weight,) = weights()
    weight.grad = torch.ones(3)
    assert not leaves_verdict_on_device(Averaged([weight], lr=0.1, fused=True))
    assert leaves_verdict_on_device(Renamed([weight], lr=0.1, fused=True))


@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused"])
def test_a_scheduler_only_sets_a_flag(name: str) -> None:
    optimizer, _ = started(name)
    for _ in range(2):
        LambdaLR(optimizer, lambda _: 1.0)
    assert leaves_verdict_on_device(optimizer)


def test_a_wrapper_is_asked_on_the_host() -> None:
    class Wrapper:
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    wrapper = Wrapper(started("sgd-fused")[0])
    assert wrapper._step_supports_amp_scaling
    assert not leaves_verdict_on_device(wrapper)


@pytest.mark.parametrize("name", FUSED)
def test_a_step_by_verdict_is_a_step_or_no_bit_changes(name: str) -> None:
    optimizer, weight = started(name)
    weight.grad = torch.full((3,), INF)
    before = snapshot(optimizer)
    step_on_device(optimizer, torch.ones(()))
    assert same(snapshot(optimizer), before)
    plain, plain_weight = started(name)
    weight.grad, plain_weight.grad = torch.full((3,), 0.25), torch.full((3,), 0.25)
    step_on_device(optimizer, torch.zeros(()))
    plain.step()
    assert same(snapshot(optimizer), snapshot(plain))
    assert not same(snapshot(optimizer), before)


def test_the_verdict_is_taken_back_also_when_the_step_fails() -> None:
    optimizer, weight = started("adamw-fused")
    weight.grad = weight.grad.to_sparse() if weight.grad is not None else None
    with pytest.raises(RuntimeError, match="sparse"):
        step_on_device(optimizer, torch.zeros(()))
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_a_scale_that_the_user_set_is_used() -> None:
    (weight,) = weights()
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    weight.grad = torch.full((3,), 2.0)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    step_on_device(optimizer, torch.zeros(()))
    assert weight.tolist() == [0.5] * 3


@pytest.mark.parametrize("arguments", [((lambda: 1.0,), {}), ((None, lambda: 1.0), {}), ((), {"closure": lambda: 1.0})])
def test_a_closure_is_refused_however_it_is_passed(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    with pytest.raises(ConfigurationError, match=r"step\(optimizer, closure\): .*train_step\(fn, \*batch\)"):
        refuse_closure(*arguments)


@pytest.mark.parametrize("arguments", [((), {}), ((None,), {}), ((), {"closure": None}), ((3,), {"grad": 1})])
def test_other_arguments_pass(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    refuse_closure(*arguments)
