from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, PersistentSkipsError, StepOrderError
from halfstep.precision import DTYPES
from halfstep.records import Precision, StepRecord
from halfstep.scaler import LossScaler
from tests.engine.loops import loss_of, make_batches, make_net, same_state
from tests.engine.sharpness import SAM, DemandingSAM

INF = float("inf")
PRECISIONS: list[Precision] = ["fp32", "bf16", "fp16"]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def lbfgs(line_search: str | None, **settings: Any) -> Make:
    return lambda model: torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5, history_size=4, line_search_fn=line_search, **settings)


def sam(kind: type[SAM] = SAM) -> Make:
    return lambda model: kind(model.parameters(), lambda groups: torch.optim.AdamW(groups, lr=0.02))


MAKES: dict[str, Make] = {
    "lbfgs": lbfgs(None),
    "lbfgs, strong wolfe": lbfgs("strong_wolfe"),
    "sam": sam(),
    "demanding sam": sam(DemandingSAM),
}
BATCH = make_batches(1, size=12)[0]


def engine(make: Make, precision: Precision = "fp16", **settings: Any) -> MixedPrecision:
    model = make_net()
    optimizer = make(model)
    return MixedPrecision(model, optimizer, precision, closure=isinstance(optimizer, SAM), **settings)


def take(amp: MixedPrecision, factors: Callable[[], float] = lambda: 1.0) -> StepRecord:
    return amp.train_step(lambda x, y: loss_of(amp.model, x, y, factors()), *BATCH)


def state_of(amp: MixedPrecision) -> Any:
    optimizers = [amp.optimizer, *(each for each in vars(amp.optimizer).values() if isinstance(each, torch.optim.Optimizer))]
    return deepcopy((amp.model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))


def by_hand(make: Make, *, steps: int, clip: float | None = None, autocast: torch.dtype | None = None) -> tuple[nn.Module, list[float]]:
    model = make_net()
    optimizer = make(model)
    seen: list[float] = []
    losses: list[float] = []

    @torch.enable_grad()
    def closure() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model, *BATCH)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        seen.append(loss.item())
        return loss

    for _ in range(steps):
        seen.clear()
        if isinstance(optimizer, SAM):
            closure()
        optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(seen[0])
    return model, losses


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("name", MAKES)
def test_in_fp32_a_run_equals_the_loop_by_hand_to_the_bit(name: str, clip: float | None) -> None:
    model, losses = by_hand(MAKES[name], steps=4, clip=clip)
    amp = engine(MAKES[name], "fp32", max_grad_norm=clip)
    records = [take(amp) for _ in range(4)]
    assert same_state(amp.model.state_dict(), model.state_dict())
    assert [record.loss for record in records] == losses
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert clip is not None or losses[-1] < losses[0]


@pytest.mark.parametrize("name", MAKES)
def test_in_bf16_it_equals_the_loop_by_hand_to_the_bit(name: str) -> None:
    model, losses = by_hand(MAKES[name], steps=3, autocast=DTYPES["bf16"])
    amp = engine(MAKES[name], "bf16")
    assert [take(amp).loss for _ in range(3)] == losses
    assert same_state(amp.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", MAKES)
def test_in_fp16_it_trains_to_the_weights_of_fp32(name: str) -> None:
    model, losses = by_hand(MAKES[name], steps=3)
    amp = engine(MAKES[name], "fp16", scaler=LossScaler(init_scale=2.0**10))
    records = [take(amp) for _ in range(3)]
    assert not any(record.skipped for record in records)
    assert [record.loss for record in records] == pytest.approx(losses, abs=100 * torch.finfo(torch.float16).eps)
    mine, other, first = (nn.utils.parameters_to_vector(each.parameters()) for each in (amp.model, model, make_net()))
    # The search along a line is sensitive to the last bits, so the runs part a little more with each evaluation.
    assert (mine - other).norm() < 0.3 * (other - first).norm()


@pytest.mark.parametrize("evaluation", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MAKES)
def test_an_overflow_in_any_evaluation_undoes_the_whole_step(name: str, precision: Precision, evaluation: int) -> None:
    if "sam" in name and evaluation > 2:
        return  # It computes gradients twice.
    amp = engine(MAKES[name], precision, scaler=LossScaler(init_scale=64.0) if precision == "fp16" else None, max_grad_norm=10.0)
    take(amp)
    before, stats = state_of(amp), amp.stats()
    moved = []

    def factor(calls: Any = itertools.count(1)) -> float:  # noqa: B008 - one count for all calls
        call = next(calls)
        moved.append(not same_state(amp.model.state_dict(), before[0]))
        return INF if call == evaluation else 1.0

    record = take(amp, factor)
    assert record.skipped
    assert len(moved) == evaluation, "it went on after the overflow"
    assert moved[-1] == (evaluation > 1), "the parameters had not moved, so nothing was undone"
    assert same_state(state_of(amp), before)
    assert (amp.stats().steps, amp.stats().skips) == (stats.steps + 1, stats.skips + 1)
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    if amp.scaler is not None:
        assert amp.scaler.get_scale() == 32.0
    assert not take(amp).skipped
    assert not same_state(state_of(amp), before)


@pytest.mark.parametrize("name", MAKES)
def test_a_step_after_a_skip_is_as_if_that_had_not_been(name: str) -> None:
    skipping, straight = (engine(MAKES[name], "fp32") for _ in range(2))
    for bad in (False, True, False, True, False):
        factors = itertools.chain([1.0, INF] if bad else [], itertools.repeat(1.0))
        assert take(skipping, lambda factors=factors: next(factors)).skipped == bad  # type: ignore[misc]
        if not bad:
            take(straight)
    assert same_state(state_of(skipping), state_of(straight))


@pytest.mark.parametrize("name", MAKES)
def test_micro_batches_are_computed_in_each_evaluation(name: str) -> None:
    whole, split = engine(MAKES[name], "fp32"), engine(MAKES[name], "fp32", accumulate=3)
    for _ in range(2):
        records = take(whole), take(split)
        assert records[0].loss == pytest.approx(records[1].loss, rel=1e-5)
    for mine, other in zip(split.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4)


def test_an_overflow_in_one_micro_batch_of_a_later_evaluation_undoes_the_step() -> None:
    amp = engine(sam(), "fp16", accumulate=2)
    take(amp)
    before = state_of(amp)
    factors = iter([1.0, 1.0, INF, 1.0])
    assert take(amp, lambda: next(factors)).skipped
    assert next(factors, None) is None
    assert same_state(state_of(amp), before)


@pytest.mark.parametrize("name", MAKES)
def test_gradients_by_hand_are_refused(name: str) -> None:
    amp = engine(MAKES[name], "fp32")
    with pytest.raises(StepOrderError, match=r"With an optimizer that takes a closure, the engine .*: use train_step\(fn, \*batch\)"):
        amp.backward(loss_of(amp.model, *BATCH))
    assert not take(amp).skipped


def test_buffers_and_the_schedule_follow_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = SAM(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, 1, gamma=0.5)
    seen: list[int] = []
    amp = MixedPrecision(
        model, optimizer, "fp16", closure=True, scheduler=scheduler, on_step=lambda record: seen.append(record.step), max_grad_norm=INF
    )
    factors = iter([1.0, 1.0, 1.0, INF, 1.0, 1.0])
    states = []
    for _ in range(3):
        record = take(amp, lambda: next(factors))
        assert record.grad_norm is not None
        assert record.grad_norm > 0
        states.append({name: value.clone() for name, value in model.named_buffers()})
    assert seen == [1, 3]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert same_state(states[0], states[1])
    assert int(states[2]["1.num_batches_tracked"]) == 4


class TwoSteps(torch.optim.Optimizer):
    """One that steps an optimizer of its own with each of two gradients, and writes into its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.AdamW(self.param_groups, lr=0.02)

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1  # As schedule-free optimizers count.
            self.inner.step()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_state_of_an_optimizer_within_is_put_back_too(precision: Precision) -> None:
    amp = engine(lambda model: TwoSteps(model.parameters()), precision, scaler=LossScaler(init_scale=64.0) if precision == "fp16" else None)
    for skips in (True, False, True):  # The first one finds no state.
        before = state_of(amp)
        factors = iter([1.0, INF if skips else 1.0])
        assert take(amp, lambda factors=factors: next(factors)).skipped == skips  # type: ignore[misc]
        assert same_state(state_of(amp), before) == skips


class Idle(torch.optim.SGD):
    """One that takes a closure and never calls it."""

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_that_never_calls_its_closure_is_an_error() -> None:
    amp = engine(lambda model: Idle(model.parameters(), lr=0.1), "fp32")
    with pytest.raises(StepOrderError, match=r"Idle\.step\(closure\) did not call its closure, so there is no gradient"):
        take(amp)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("evaluation", [1, 2])
@pytest.mark.parametrize("name", MAKES)
def test_an_exception_inside_leaves_nothing_behind(name: str, evaluation: int, error: type[BaseException]) -> None:
    amp, fresh = engine(MAKES[name]), engine(MAKES[name])
    take(amp)
    take(fresh)
    before = state_of(amp)
    calls = itertools.count(1)

    def fail() -> float:
        if next(calls) == evaluation:
            raise error("inside")
        return 1.0

    with pytest.raises(error, match="inside"):
        take(amp, fail)
    assert same_state(state_of(amp), before)
    records = take(amp), take(fresh)
    assert records[0].step == records[1].step == 2
    assert same_state(state_of(amp), state_of(fresh))
    assert amp.stats() == fresh.stats()


def test_endless_skipping_ends() -> None:
    amp = engine(sam(), "bf16", max_consecutive_skips=2)
    assert take(amp, lambda: INF).skipped
    with pytest.raises(PersistentSkipsError, match="2"):
        take(amp, lambda: INF)


def test_non_finite_gradients_reach_the_optimizer_when_that_is_asked_for() -> None:
    amp = engine(sam(), "bf16", skip_nonfinite=False)
    assert not take(amp, lambda: INF).skipped


def test_it_steps_with_no_other() -> None:
    model = make_net()
    first, second = SAM(model[0].parameters(), torch.optim.SGD), torch.optim.SGD(model[3].parameters())  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="SAM computes gradients several times in its step, so it cannot step together"):
        MixedPrecision(model, [first, second], "fp32", closure=True)
