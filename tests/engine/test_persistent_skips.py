from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, InvalidTypeError, PersistentSkipsError
from halfstep.scaler import LossScaler
from tests.engine.loops import OPTIMIZERS, same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]


def engine(precision: str, *, optimizer: str = "adamw", **settings: Any) -> MixedPrecision:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), precision, **settings)


def step(amp: MixedPrecision, factor: float, *, by_hand: bool = False) -> bool:
    if not by_hand:
        return amp.train_step(lambda: amp.model(torch.eye(3)).float().square().mean() * factor * 1e-3).skipped
    with amp.autocast():
        loss = amp.model(torch.eye(3)).float().square().mean() * factor * 1e-3
    amp.backward(loss)
    record = amp.step()
    assert record is not None
    return record.skipped


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_raises_at_the_last_skip_that_is_allowed_and_the_engine_goes_on(
    precision: str, optimizer: str, limit: int, by_hand: bool
) -> None:
    amp = engine(precision, optimizer=optimizer, max_consecutive_skips=limit)
    for _ in range(2):
        assert not step(amp, 1.0, by_hand=by_hand)
        before = {name: value.clone() for name, value in amp.model.state_dict().items()}
        for _ in range(limit - 1):
            assert step(amp, INF, by_hand=by_hand)
        with pytest.raises(PersistentSkipsError, match=rf"{limit} "):
            step(amp, INF, by_hand=by_hand)
        assert same_state(amp.model.state_dict(), before)
        assert all(parameter.grad is None for parameter in amp.model.parameters())
    assert not step(amp, 1.0, by_hand=by_hand)
    assert (amp.stats().steps, amp.stats().skips, amp.stats().consecutive_skips) == (2 * (limit + 1) + 1, 2 * limit, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_skips_that_are_not_in_a_row_never_add_up(precision: str, optimizer: str) -> None:
    amp = engine(precision, optimizer=optimizer, max_consecutive_skips=3)
    for factor in [INF, INF, 1.0] * 4:
        assert step(amp, factor) == (factor == INF)
    assert amp.stats().skips == 8


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_limit_it_never_raises(precision: str, optimizer: str) -> None:
    amp = engine(precision, optimizer=optimizer, max_consecutive_skips=None)
    assert all(step(amp, INF) for _ in range(150))
    assert amp.stats().consecutive_skips == 150
    assert not step(amp, 1.0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_limit_is_100_by_default(precision: str) -> None:
    amp = engine(precision)
    assert all(step(amp, INF) for _ in range(99))
    with pytest.raises(PersistentSkipsError, match="100 "):
        step(amp, INF)


def test_a_scaler_that_is_given_has_its_own_limit() -> None:
    amp = engine("fp16", scaler=LossScaler(max_consecutive_skips=2), max_consecutive_skips=1)
    assert step(amp, INF)
    with pytest.raises(PersistentSkipsError, match="2 "):
        step(amp, INF)


def test_where_nothing_is_checked_nothing_is_counted() -> None:
    amp = engine("bf16", skip_nonfinite=False, max_consecutive_skips=1)
    assert not any(step(amp, INF) for _ in range(3))
    assert (amp.stats().steps, amp.stats().skips) == (3, 0)


@pytest.mark.parametrize(
    ("limit", "error", "match"),
    [
        (0, ConfigurationError, r"max_consecutive_skips=0\): the number of skips in a row that ends the run is 1 or more"),
        (1.0, InvalidTypeError, r"max_consecutive_skips=\.\.\.\) takes a whole number, not 1\.0"),
        (True, InvalidTypeError, r"takes a whole number, not True"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wrong_limit_is_refused(precision: str, limit: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        engine(precision, max_consecutive_skips=limit)
