"""Which backward pass reached which optimizer, told by its gradients alone."""

# `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.watching.lines import NOWHERE, Line
from halfstep.watching.states import OptimizerState, ScalerState, parameters_of

pytestmark = pytest.mark.usefixtures("one_thread")


def witnesses(state: OptimizerState) -> list[int]:
    """The parameters that stand for all, by `id`."""
    return [id(each()) for each in state._witnesses]


class Training:
    """An optimizer, and what is known of it as a watch would have it."""

    def __init__(self, count: int, *, frozen: int = 0) -> None:
        self.parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
        for each in self.parameters[:frozen]:
            each.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.state = OptimizerState(optimizer=ref(self.optimizer))
        self.kept = 0  # How many backward passes the gradients are of.
        self.state.refresh()

    @property
    def gradients(self) -> list[Tensor]:
        return [each.grad for each in self.parameters if each.grad is not None]

    def backward(self, parameters: list[nn.Parameter] | None = None) -> bool:
        """A backward pass, with what a watch does around it; returns whether it was seen to reach the optimizer."""
        wanted = [each for each in (self.parameters if parameters is None else parameters) if each.requires_grad]
        fresh, before = self.state.look()
        if fresh:
            self.kept = 0
        torch.stack([each.square().sum() for each in wanted]).sum().backward()
        reached = self.state.is_reached(before)
        self.kept += reached
        return reached

    def elsewhere(self) -> bool:
        return self.backward([nn.Parameter(torch.ones(2))])

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def write(self) -> None:
        """A hand that nobody knows changes the gradients."""
        for each in self.gradients:
            each.mul_(0.0)

    def unscale(self) -> None:
        """What is known to write to them, and is no new gradient."""
        for each in self.gradients:
            each.mul_(0.5)
        self.state.note_gradients()

    def step(self) -> None:
        self.optimizer.step()


# What each does to the number of backward passes that the gradients are of, given whether there are gradients.
MODEL: dict[str, Callable[[int], int]] = {
    "backward": lambda kept: kept + 1,
    "elsewhere": lambda kept: kept,
    "zero": lambda _: 0,
    "zero_in_place": lambda _: 0,
    "write": lambda _: 0,
    "unscale": lambda kept: kept,
    "step": lambda kept: kept,
}


@given(st.integers(1, 9), st.integers(0, 2), st.lists(st.sampled_from(sorted(MODEL)), max_size=14))
@example(2, 0, ["backward", "unscale", "backward", "zero_in_place", "elsewhere", "backward"])
def test_it_knows_of_which_backward_passes_the_gradients_are(count: int, frozen: int, actions: list[str]) -> None:
    training = Training(count, frozen=min(frozen, count - 1))
    kept = 0
    for action in actions:
        if action == "unscale" and kept == 0:  # It would make what was zeroed look like what a pass has left.
            continue
        reached = getattr(training, action)()
        kept = MODEL[action](kept)
        if action in {"backward", "elsewhere"}:
            assert reached is (action == "backward")
            assert training.kept == kept
    training.backward()
    assert training.kept == kept + 1


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like])
def test_a_gradient_that_was_replaced_is_not_what_the_pass_left(make: Callable[[Tensor], Tensor]) -> None:
    training = Training(3)
    training.backward()
    for each in training.parameters:
        each.grad = make(each)
    training.backward()
    assert training.kept == 1


def test_a_pass_that_reaches_a_part_of_the_parameters_is_seen_at_the_first_and_the_last() -> None:
    training = Training(40)
    assert training.backward(training.parameters[:1])
    assert training.backward(training.parameters[-1:])
    assert training.kept == 2


@pytest.mark.parametrize(
    ("count", "places"), [(0, []), (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (10, [0, 3, 6, 9]), (101, [0, 33, 66, 100])]
)
def test_few_parameters_stand_for_all(count: int, places: list[int]) -> None:
    training = Training(max(count, 1))
    if not count:
        training.optimizer.param_groups[0]["params"].clear()
        training.state.refresh()
    assert witnesses(training.state) == [id(training.parameters[place]) for place in places]


def test_frozen_parameters_stand_for_nothing() -> None:
    training = Training(9, frozen=5)
    assert set(witnesses(training.state)) == {id(each) for each in training.parameters[5:]}
    assert training.state.identities == {id(each) for each in training.parameters}


def test_without_parameters_that_train_no_pass_reaches_it() -> None:
    training = Training(2, frozen=2)
    assert training.elsewhere() is False
    assert training.state.look() == (True, [])


def test_groups_that_are_added_are_taken_in() -> None:
    training, added = Training(2), nn.Parameter(torch.ones(2))
    training.optimizer.add_param_group({"params": [added]})
    assert training.backward([added]) is False
    training.state.refresh()
    assert id(added) in training.state.identities
    assert training.backward([added]) is True
    assert parameters_of(training.optimizer) == [*training.parameters, added]


def test_others_stand_for_all_where_those_before_get_no_gradients() -> None:
    training = Training(12)
    lucky = training.parameters[4:6]
    assert training.backward(lucky) is False
    training.state.choose_reached()
    assert set(witnesses(training.state)) == {id(each) for each in lucky}
    assert training.state.look()[0] is False  # These are gradients that are known now.
    assert training.backward(lucky) is True


def test_what_has_no_groups_has_no_parameters() -> None:
    class Wrapper:
        pass

    wrapper: Any = Wrapper()
    state = OptimizerState(optimizer=ref(wrapper))
    state.refresh()
    assert (parameters_of(wrapper), state.look()) == ([], (True, []))


class TestScalers:
    line, other = Line("train.py", 3, is_direct=True), Line("train.py", 9, is_direct=True)

    def state(self, **known: Any) -> ScalerState:
        return ScalerState(scaler=ref(torch.amp.GradScaler("cpu")), **known)

    def test_it_is_used_once_it_has_scaled(self) -> None:
        assert not self.state(created=self.line).is_used
        assert self.state(first_use=self.line).is_used
        assert self.state(was_used=True).is_used

    def test_its_place_is_where_it_was_made_or_else_first_used(self) -> None:
        assert self.state(created=self.line, first_use=self.other).place is self.line
        assert self.state(first_use=self.other).place is self.other
        assert self.state().place is NOWHERE
