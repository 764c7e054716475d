"""Whether training goes on cleanly: a few steps are taken for it, and nobody notices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.replay.runs import Replay, StepCode
from halfstep.replay.verification import FURTHER, Course, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FP16, FP32 = Policy.parse("fp16"), Policy.parse("fp32")


def squares(step: int, out: Tensor) -> Tensor:
    return out.float().square().mean()


class Work:
    """A model and the steps of its training, which note what they see."""

    def __init__(self, *, model: Any = None, loss: Callable[[int, Tensor], Tensor] = squares) -> None:
        self.model: Any = model or nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.seen: list[tuple[int, dict[str, Tensor]]] = []
        self._loss = loss

    def code(self, step: int) -> StepCode:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))

        def compute() -> Tensor:
            self.seen.append((step, {name: each.detach().clone() for name, each in self.model.named_parameters()}))
            return self._loss(step, self.model(x))

        return StepCode(model=self.model, parts=[(compute, 1.0)])

    def is_clean(
        self, *optimizers: Optimizer, policy: Policy = FP16, scale: float = 8.0, most: float | None = None, steps: int = FURTHER
    ) -> bool:
        following = [self.code(step) for step in range(1, steps + 1)]
        course = Course(following=following, optimizers=optimizers, max_grad_norm=most)
        with Replay(self.code(0), device=CPU) as replay:
            run = replay.run(policy, scale=scale)
            kept = {name: each.clone() for name, each in run.gradients.items()}
            self.seen.clear()
            answer = course.is_clean(replay, run)
            assert all(torch.equal(each, kept[name]) for name, each in run.gradients.items()), "the gradients of the run are its own"
        return answer

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.seen]


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "adam": lambda each: torch.optim.Adam(each, lr=0.1),
    "adamw fused": lambda each: torch.optim.AdamW(each, lr=0.1, fused=True),
    "lbfgs": lambda each: torch.optim.LBFGS(each, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("after", [0, 2])
def test_nothing_is_left_of_it(name: str, after: int) -> None:
    work = Work()
    optimizer = MAKERS[name](work.model.parameters())
    for _ in range(after):
        for parameter in work.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        plain_step(optimizer, lambda: torch.tensor(1.0))
    gradients = [each.grad for each in work.model.parameters()]
    state, random = copy.deepcopy((work.model.state_dict(), optimizer.state_dict())), RandomState.capture()
    assert work.is_clean(optimizer)
    assert set(work.steps) >= {1, 2, 3}
    for (path, one), (other_path, other) in zip(leaves(state), leaves((work.model.state_dict(), optimizer.state_dict())), strict=True):
        assert path == other_path
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, path
    assert all(each.grad is gradient for each, gradient in zip(work.model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random.cpu)


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for name, each in value.items() for leaf in leaves(each, f"{path}/{name}")]
    if isinstance(value, list | tuple):
        return [leaf for place, each in enumerate(value) for leaf in leaves(each, f"{path}/{place}")]
    return [(path, value)]


def test_no_hook_and_no_scheduler_hears_of_it() -> None:
    work, calls = Work(), []

    def note(*_: Any) -> None:
        calls.append(1)

    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.1)
    handles = [
        optimizer.register_step_pre_hook(note),
        optimizer.register_step_post_hook(note),
        register_optimizer_step_pre_hook(note),
        register_optimizer_step_post_hook(note),
    ]
    try:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        replaced = optimizer.step
        assert work.is_clean(optimizer)
        assert calls == []
        assert scheduler.last_epoch == 0
        assert optimizer.step is replaced or vars(optimizer)["step"] is not None
        optimizer.step()
        assert len(calls) == 4, "the hooks are there again"
    finally:
        for handle in handles:
            handle.remove()


class TestSteps:
    def test_they_are_taken_with_unscaled_gradients_one_after_the_other(self) -> None:
        work = Work(model=nn.Linear(3, 1, bias=False), loss=lambda step, out: out.float().sum())
        before = work.model.weight.detach().clone()
        optimizer = torch.optim.SGD(work.model.parameters(), lr=1.0)
        assert work.is_clean(optimizer, policy=FP32, scale=1024.0)
        assert work.steps == [1, 2, 3]
        expected: Any = before
        for step, seen in work.seen:
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step - 1))
            expected = expected - x.sum(0)
            assert torch.allclose(seen["weight"], expected, atol=1e-5), step
        assert torch.equal(work.model.weight, before)

    @pytest.mark.parametrize("most", [0.5, 2.0])
    def test_gradients_are_clipped_after_they_are_unscaled(self, most: float) -> None:
        work = Work(model=nn.Linear(3, 1, bias=False), loss=lambda step, out: out.float().sum() * 100)
        before: Any = work.model.weight.detach().clone()
        assert work.is_clean(torch.optim.SGD(work.model.parameters(), lr=1.0), policy=FP32, scale=64.0, most=most)
        moved = torch.linalg.vector_norm(work.seen[0][1]["weight"] - before)
        assert float(moved) == pytest.approx(most, rel=1e-3)

    def test_two_optimizers_both_step(self) -> None:
        work = Work()
        first, last = work.model[0], work.model[3]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, last)]
        before = work.model[0].weight.detach().clone(), work.model[3].weight.detach().clone()
        assert work.is_clean(*optimizers)
        assert not torch.equal(work.seen[0][1]["0.weight"], before[0])
        assert not torch.equal(work.seen[0][1]["3.weight"], before[1])

    def test_without_an_optimizer_parameters_stay(self) -> None:
        work = Work()
        assert work.is_clean()
        assert work.steps == [1, 2, 3]
        assert all(torch.equal(seen["0.weight"], work.model[0].weight) for _, seen in work.seen)

    def test_one_that_takes_a_closure_computes_gradients_again(self) -> None:
        work = Work()
        optimizer = torch.optim.LBFGS(work.model.parameters(), lr=0.1, max_iter=2)
        assert work.is_clean(optimizer, scale=2.0**12)
        assert work.steps[:2] == [0, 0]
        assert work.steps.count(3) > 1, "the closure of a further step computes that step"


class TestVerdict:
    @pytest.mark.parametrize(("step", "is_clean"), [(1, False), (3, False), (4, True)])
    def test_a_further_step_that_is_not_finite(self, step: int, is_clean: bool) -> None:
        work = Work(loss=lambda at, out: out.float().mean() * (torch.nan if at == step else 1.0))
        assert work.is_clean(torch.optim.SGD(work.model.parameters(), lr=0.1)) == is_clean

    @pytest.mark.parametrize("rate", [1e38, torch.inf])
    def test_a_step_that_makes_weights_infinite(self, rate: float) -> None:
        work = Work(loss=lambda step, out: out.float().sum() * 1e3)
        optimizer = torch.optim.SGD(work.model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = rate
        before = copy.deepcopy(work.model.state_dict())
        assert not work.is_clean(optimizer, steps=0), "the step that failed alone"
        assert not work.is_clean(optimizer)
        assert all(torch.equal(each, before[name]) for name, each in work.model.state_dict().items())

    def test_after_a_step_that_is_not_clean_nothing_more_is_computed_with_it(self) -> None:
        work = Work(loss=lambda step, out: out.float().mean() * (torch.inf if step == 1 else 1.0))
        assert not work.is_clean(torch.optim.SGD(work.model.parameters(), lr=0.1), scale=1.0)
        first = next(seen for step, seen in work.seen if step == 1)
        later = [seen for step, seen in work.seen if step == 3]
        assert all(torch.equal(seen["0.weight"], first["0.weight"]) for seen in later), "no step with gradients that are not finite"


class Gate(nn.Module):
    """A gradient in fp16 that is as large as the loss scale times a number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.half()


def gate(*sizes: float) -> Work:
    return Work(model=Gate(), loss=lambda step, out: out.float().sum() * sizes[step])


class TestScale:
    def test_it_comes_down_and_stays_there(self) -> None:
        work = gate(1.0, 1.0, 8.0, 8.0)
        assert work.is_clean(torch.optim.SGD(work.model.parameters(), lr=1e-9), scale=2.0**14)
        assert work.steps == [1, 2, 2, 2, 3], "2**14 and 2**13 are too high for the second, and 2**12 is not for the third"

    @pytest.mark.parametrize(("size", "is_clean"), [(31.0, True), (33.0, False)])
    def test_it_is_halved_four_times_at_most(self, size: float, is_clean: bool) -> None:
        work = gate(1.0, size)
        assert work.is_clean(torch.optim.SGD(work.model.parameters(), lr=1e-9), scale=2.0**15, steps=1) == is_clean
        assert work.steps == [1] * 5

    def test_it_does_not_come_below_one(self) -> None:
        work = gate(1.0, 1e5)
        assert not work.is_clean(torch.optim.SGD(work.model.parameters(), lr=1e-9), scale=2.0, steps=1)
        assert work.steps == [1, 1]

    def test_a_scale_below_one_is_not_raised(self) -> None:
        work = gate(1.0, 1e5)
        optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-9)
        assert work.is_clean(optimizer, scale=0.5, steps=1)
        assert not gate(1.0, 2e5).is_clean(scale=0.5, steps=1)
        assert work.steps == [1]


class TestPlainStep:
    def test_it_is_the_step_of_the_class(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(1)

        def refuse(*_: Any) -> None:
            raise AssertionError("the step that was put in its place")

        optimizer.step = refuse  # type: ignore[method-assign,assignment]
        plain_step(optimizer, None)
        assert weight.item() == 0.0

    @pytest.mark.parametrize(("make", "called"), [(MAKERS["lbfgs"], True), (MAKERS["sgd"], False), (MAKERS["adamw fused"], False)])
    def test_a_closure_is_called_where_one_is_needed(self, make: Callable[[Any], Optimizer], called: bool) -> None:
        weight = nn.Parameter(torch.ones(1))
        calls = []

        def closure() -> Tensor:
            calls.append(1)
            weight.grad = torch.ones(1)
            return weight.detach().sum()

        weight.grad = torch.ones(1)
        plain_step(make([weight]), closure)
        assert bool(calls) == called
        assert weight.item() < 1
