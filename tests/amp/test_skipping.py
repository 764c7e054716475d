from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from halfstep._torch import steps_are_observed
from halfstep.amp.skipping import StepGuard
from halfstep.errors import ConfigurationError, StepOrderError


def make(*, fused: bool = False) -> tuple[nn.Parameter, Optimizer, StepGuard]:
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    weight.grad = torch.ones(())
    guard = StepGuard()
    optimizer.register_step_pre_hook(guard)
    return weight, optimizer, guard


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_the_next_step_is_skipped_once(times: int, fused: bool) -> None:
    weight, optimizer, guard = make(fused=fused)
    for _ in range(times):
        guard.skip_next(optimizer)
    assert optimizer.step() is None
    assert weight.item() == 0
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert weight.item() == -1


def test_hooks_see_no_step_that_is_skipped() -> None:
    _, optimizer, guard = make()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    guard.skip_next(optimizer)
    optimizer.step()
    assert seen == []
    optimizer.step()
    assert seen == ["before", "after"]


def test_below_a_scheduler_the_first_step_may_be_skipped_without_a_warning() -> None:
    weight, optimizer, guard = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapped = vars(optimizer)["step"]
    after: list[object] = []
    optimizer.register_step_post_hook(lambda *_: after.append(None))
    guard.skip_next(optimizer)
    optimizer.step()
    scheduler.step()  # It would warn, and a warning is an error here.
    assert weight.item() == 0
    assert after == []
    assert vars(optimizer)["step"] is wrapped
    optimizer.step()
    scheduler.step()
    assert weight.item() == -0.5
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_that_is_made_before_the_skipped_step_stays() -> None:
    weight, optimizer, guard = make()
    guard.skip_next(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for expected in (0, -0.5):
        optimizer.step()
        scheduler.step()
        assert weight.item() == expected
    guard.skip_next(optimizer)
    optimizer.step()
    assert weight.item() == -0.5
    optimizer.step()
    assert weight.item() == -0.75


def test_a_second_scheduler_that_is_made_before_the_skipped_step_leaves_the_step_to_the_first() -> None:
    weight, optimizer, guard = make()
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
    wrapped = vars(optimizer)["step"]
    guard.skip_next(optimizer)
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    optimizer.step()
    assert vars(optimizer)["step"] is wrapped
    for scheduler in schedulers:
        scheduler.step()
    optimizer.step()
    assert weight.item() == -0.25


def test_whoever_asks_is_told_that_nobody_counts_steps() -> None:
    _, optimizer, _ = make()
    assert not steps_are_observed(optimizer)


def test_a_step_that_somebody_counts_is_not_counted_when_it_is_skipped() -> None:
    weight, optimizer, guard = make()
    original = optimizer.step
    taken: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        taken.append(None)
        return result

    optimizer.step = counted  # type: ignore[method-assign]
    guard.skip_next(optimizer)
    optimizer.step()
    assert (weight.item(), taken) == (0, [])
    optimizer.step()
    assert (weight.item(), taken) == (-1, [None])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_for_a_step_that_is_skipped(by_name: bool) -> None:
    weight, optimizer, guard = make()

    def closure() -> float:
        raise AssertionError

    guard.skip_next(optimizer)
    with pytest.raises(ConfigurationError, match=r"optimizer.step\(closure\): the step is to be skipped"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    optimizer.step()
    assert weight.item() == -1


def test_no_step_with_gradients_that_are_still_scaled() -> None:
    weight, optimizer, guard = make()
    guard.scale = torch.tensor(8.0)
    with pytest.raises(
        StepOrderError, match=r"gradients were multiplied by the loss scale: the last amp.scale_loss had delay_unscale=True"
    ):
        optimizer.step()
    assert weight.item() == 0
    weight.grad = None
    optimizer.step()


def test_gradients_of_another_scale() -> None:
    *_, guard = make()
    guard.check_scale(torch.tensor(4.0))
    guard.scale = torch.tensor(8.0)
    guard.check_scale(torch.tensor(8.0))
    with pytest.raises(StepOrderError, match="are multiplied by 8, and the loss scale is now 4: they cannot be added up"):
        guard.check_scale(torch.tensor(4.0))


def test_an_optimizer_with_a_guard_is_copied_and_pickled_as_any() -> None:
    _, optimizer, guard = make()
    guard.skip_next(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (weight,) = other.param_groups[0]["params"]
        weight.grad = torch.ones(())
        other.step()
        assert weight.item() == -1


def test_it_does_not_keep_the_optimizer_alive() -> None:

    _, optimizer, guard = make()
    guard.skip_next(optimizer)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
