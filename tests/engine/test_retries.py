from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, InvalidTypeError, PersistentSkipsError, StepOrderError
from halfstep.scaler import LossScaler
from tests.engine.loops import same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]


def engine(precision: str = "fp16", *, fused: bool = False, **settings: Any) -> MixedPrecision:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
    if precision == "fp16":
        settings.setdefault("scaler", LossScaler(init_scale=2.0**10))
    return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), precision, **settings)


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_try_has_the_same_random_numbers_and_the_next_step_has_others(accumulate: int, fused: bool) -> None:
    amp = engine(retries=3, accumulate=accumulate, fused=fused)
    masks: list[Any] = []

    def draw(_: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        masks.append(((output == 0).tolist(), random.random(), np.random.rand()))

    amp.model[2].register_forward_hook(draw)  # type: ignore[index]
    factors = iter([INF] * 2 * accumulate + [1.0] * 2 * accumulate)
    record = amp.train_step(lambda x: amp.model(x).float().mean() * next(factors), X)
    tries = [masks[start : start + accumulate] for start in range(0, len(masks), accumulate)]
    assert len(tries) == 3
    assert tries[0] == tries[1] == tries[2]
    assert (record.step, record.skipped, record.scale) == (3, False, 2.0**8)
    masks.clear()
    amp.train_step(lambda x: amp.model(x).float().mean() * next(factors), X)
    assert masks != tries[0]
    assert amp.stats().steps == 4
    assert amp.stats().skips == 2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_try_is_what_the_step_would_have_been_with_the_lower_scale(accumulate: int, fused: bool) -> None:
    amp = engine(retries=2, accumulate=accumulate, fused=fused)
    lower = engine(scaler=LossScaler(init_scale=2.0**8), accumulate=accumulate, fused=fused)
    factors = iter([INF] * 2 * accumulate + [1.0] * accumulate)
    torch.manual_seed(9)
    records = [amp.train_step(lambda x: amp.model(x).float().mean() * next(factors), X)]
    after = torch.rand(1)
    torch.manual_seed(9)
    records.append(lower.train_step(lambda x: lower.model(x).float().mean(), X))
    assert torch.equal(after, torch.rand(1)), "the random numbers do not go on as after one step"
    assert records[0].loss == records[1].loss
    assert same_state(amp.model.state_dict(), lower.model.state_dict())
    assert same_state(amp.optimizer.state_dict(), lower.optimizer.state_dict())


def test_a_real_overflow_of_the_scale_is_overcome_in_one_call() -> None:
    amp = engine(scaler=LossScaler(init_scale=2.0**30), retries=30)
    record = amp.train_step(lambda x: amp.model(x).float().mean(), X)
    assert not record.skipped
    assert record.step > 5
    assert record.scale == 2.0 ** (30 - (record.step - 1))


@pytest.mark.parametrize("retries", [1, 2, 5])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_gives_up_after_so_many_tries(precision: str, static: bool, retries: int) -> None:
    scaler = LossScaler(init_scale=2.0**10, static=static) if precision == "fp16" else None
    amp = engine(precision, scaler=scaler, retries=retries)
    before = {name: value.clone() for name, value in amp.model.state_dict().items()}
    calls = iter(range(100))
    record = amp.train_step(lambda x: amp.model(x).float().mean() * INF * (1 + next(calls)), X)
    assert record.skipped
    assert next(calls) == record.step == retries + 1
    assert (amp.stats().steps, amp.stats().skips) == (retries + 1, retries + 1)
    assert same_state(amp.model.state_dict(), before)
    if scaler is not None:
        assert scaler.get_scale() == (2.0**10 if static else 2.0 ** (10 - retries - 1))


def test_a_step_that_is_taken_is_not_tried_again() -> None:
    amp = engine(retries=3)
    assert [amp.train_step(lambda x: amp.model(x).float().mean(), X).step for _ in range(3)] == [1, 2, 3]


def test_a_schedule_moves_once_for_all_tries() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    amp = MixedPrecision(model, optimizer, "bf16", retries=2, scheduler=scheduler, on_step=lambda record: seen.append(record.step))
    factors = iter([INF, 1.0])
    amp.train_step(lambda x: model(x).float().mean() * next(factors), X)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert seen == [2]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_by_hand_are_refused(precision: str) -> None:
    amp = engine(precision, retries=2)
    with pytest.raises(StepOrderError, match=r"With retries=2 the engine computes gradients several times in one step: use train"):
        amp.backward(amp.model(X).float().mean())
    with pytest.raises(StepOrderError, match=r"step\(\) was called before backward"):
        amp.step()
    assert amp.train_step(lambda x: amp.model(x).float().mean(), X).step == 1


def test_endless_skipping_ends_between_tries() -> None:
    amp = engine("bf16", retries=5, max_consecutive_skips=3)
    with pytest.raises(PersistentSkipsError, match="3"):
        amp.train_step(lambda x: amp.model(x).float().mean() * INF, X)
    assert amp.stats().skips == 3
    assert not amp.train_step(lambda x: amp.model(x).float().mean(), X).skipped


def test_an_exception_in_a_later_try_passes_through() -> None:
    amp = engine(retries=3)
    before = {name: value.clone() for name, value in amp.model.state_dict().items()}
    factors = iter([INF])

    def fails(x: Tensor) -> Tensor:
        return amp.model(x).float().mean() * next(factors)  # type: ignore[no-any-return]

    with pytest.raises(StopIteration):
        amp.train_step(fails, X)
    assert same_state(amp.model.state_dict(), before)
    assert amp.train_step(lambda x: amp.model(x).float().mean(), X).step == 2


@pytest.mark.parametrize(
    ("retries", "error", "match"),
    [
        (-1, ConfigurationError, r"MixedPrecision\(retries=-1\): the number of times that a skipped step is tried again is 0 or more"),
        (1.0, InvalidTypeError, r"retries=\.\.\.\) takes a whole number, not 1\.0"),
        (True, InvalidTypeError, r"takes a whole number, not True"),
        (None, InvalidTypeError, r"takes a whole number, not None"),
    ],
)
def test_a_wrong_number_is_refused(retries: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        engine(retries=retries)
