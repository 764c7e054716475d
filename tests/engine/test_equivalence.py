from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfstep.engine import MixedPrecision
from halfstep.records import Precision
from halfstep.scaler import LossScaler, ScalerSettings
from tests.engine.loops import OPTIMIZERS, Run, by_hand, by_manual_calls, by_train_step, make_batches, make_net, same_state, snapshot

INF = float("inf")


@pytest.mark.parametrize("drive", [by_train_step, by_manual_calls])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_equals_the_loop_by_hand_to_the_bit(
    precision: Precision, optimizer: str, clip: float | None, accumulate: int, drive: Callable[..., None]
) -> None:
    batches = make_batches(5)
    hand, engine = Run.start(optimizer, precision=precision), Run.start(optimizer, precision=precision)
    by_hand(hand, batches, precision=precision, clip=clip, accumulate=accumulate)
    drive(engine, batches, precision=precision, clip=clip, accumulate=accumulate)
    assert same_state(snapshot(engine), snapshot(hand))
    assert engine.losses == hand.losses
    assert engine.norms == hand.norms
    assert engine.scales == hand.scales
    assert engine.lrs == hand.lrs == pytest.approx([hand.lrs[0] * 0.5 ** (step // 2) for step in range(5)])
    assert engine.skipped == [False] * 5
    if precision == "fp16":
        assert hand.scaler is not None
        assert engine.scaler is not None
        assert engine.scaler.state_dict() == hand.scaler.state_dict()
        assert engine.scales == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12]
    if clip is not None:
        assert all(norm is not None and norm > clip for norm in engine.norms), "the gradients were small enough not to be clipped"


def test_a_run_in_half_precision_differs_from_one_in_fp32() -> None:
    batches = make_batches(2)
    ends = []
    for precision in ("fp32", "bf16", "fp16"):
        run = Run.start("sgd", precision=precision)
        by_train_step(run, batches, precision=precision, clip=None, accumulate=1)
        ends.append(tuple(run.losses))
    assert len(set(ends)) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_operations_run_in_the_dtype_of_the_precision(precision: str) -> None:
    seen: list[torch.dtype] = []
    model = make_net()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    assert amp.precision == precision

    def loss(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        seen.append(out.dtype)
        return out.float().square().mean()

    amp.train_step(loss, torch.randn(4, 5))
    assert seen == [{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_loss_is_scaled_in_fp32_and_bf16(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a loss was scaled")

    monkeypatch.setattr(LossScaler, "scale", refuse)
    model = make_net()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    record = amp.train_step(lambda x: model(x).float().mean(), torch.randn(4, 5))
    assert amp.scaler is None
    assert record.scale == 1.0


def test_fp16_makes_a_scaler_that_ends_endless_skipping() -> None:
    model = make_net()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    assert isinstance(amp.scaler, LossScaler)
    assert amp.scaler.is_enabled()
    assert amp.scaler.settings == ScalerSettings(max_consecutive_skips=100)
    assert amp.train_step(lambda x: model(x).float().mean() * 1e-3, torch.randn(4, 5)).scale == 2.0**16


@pytest.mark.parametrize("drive", [by_train_step, by_manual_calls])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_skips_equals_the_loop_by_hand_to_the_bit(
    optimizer: str, clip: float | None, accumulate: int, drive: Callable[..., None]
) -> None:
    batches = make_batches(7)
    # A fused SGD that skips its very first step reads uninitialized momentum in torch's own loop; see the next test.
    factors = [1.0 if optimizer == "sgd-fused" else INF, 1.0, 1.0, INF, INF, 1.0, 1.0]
    hand, engine = Run.start(optimizer, precision="fp16"), Run.start(optimizer, precision="fp16")
    by_hand(hand, batches, precision="fp16", clip=clip, accumulate=accumulate, factors=factors)
    drive(engine, batches, precision="fp16", clip=clip, accumulate=accumulate, factors=factors)
    assert engine.skipped == [factor == INF for factor in factors]
    assert same_state(snapshot(engine), snapshot(hand))
    assert engine.scales == hand.scales
    assert engine.lrs == hand.lrs
    assert hand.scaler is not None
    assert engine.scaler is not None
    assert engine.scaler.state_dict() == hand.scaler.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_after_a_skipped_first_step_as_if_that_step_had_not_been(optimizer: str) -> None:
    batches = make_batches(4)
    whole, rest = Run.start(optimizer, precision="fp16"), Run.start(optimizer, precision="fp16")
    by_train_step(whole, batches, precision="fp16", clip=None, accumulate=1, factors=[INF, 1.0, 1.0, 1.0])
    assert rest.scaler is not None
    rest.scaler.scale(torch.ones(()))
    rest.scaler.update(2.0**9)
    by_train_step(rest, batches[1:], precision="fp16", clip=None, accumulate=1)
    assert same_state(snapshot(whole), snapshot(rest))
    assert whole.losses[1:] == rest.losses
    assert whole.scales[1:] == rest.scales


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_without_loss_scaling_is_skipped_when_its_gradients_are_not_finite(precision: Precision, optimizer: str) -> None:
    run = Run.start(optimizer, precision=precision)
    batches = make_batches(4)
    by_train_step(run, batches[:1], precision=precision, clip=None, accumulate=1)
    before = snapshot(run)
    by_train_step(run, batches[1:3], precision=precision, clip=None, accumulate=1, factors=[INF, math.nan])
    assert run.skipped == [False, True, True]
    assert same_state(snapshot(run), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_taken_whatever_its_gradients_when_that_is_asked_for(precision: Precision) -> None:
    model = torch.nn.Linear(2, 1)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, skip_nonfinite=False)
    assert not amp.train_step(lambda x: (model.weight * x).sum(), INF).skipped
    assert bool(model.weight.isinf().any())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_seed_twice_gives_the_same_losses_to_the_bit(precision: Precision, accumulate: int) -> None:
    def losses() -> list[float]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
        amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision, accumulate=accumulate)
        fn = torch.nn.CrossEntropyLoss()
        return [amp.train_step(lambda x, y: fn(model(x), y), x, y).loss for x, y in make_batches(8)]

    assert losses() == losses()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_real_net_learns(precision: Precision) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(128, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    amp = MixedPrecision(
        model, optimizer, precision, max_grad_norm=1.0, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    )
    records = [amp.train_step(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), x, y) for _ in range(80)]
    assert records[0].loss > 0.6
    assert records[-1].loss < 0.25
    assert not any(record.skipped for record in records)
    with torch.no_grad(), amp.autocast():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy > 0.9
