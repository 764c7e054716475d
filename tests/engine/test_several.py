"""Several optimizers in one engine, and several engines with one scaler."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.scaler import LossScaler
from tests.engine.loops import OPTIMIZERS, loss_of, make_batches, make_net, same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]
SCALERS = [LossScaler, torch.amp.GradScaler]
PAIRS = [("momentum", "adamw"), ("sgd-fused", "adamw-fused"), ("adamw-fused", "momentum")]


def pair(names: Sequence[str]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model: Any = make_net()
    return model, [OPTIMIZERS[name](part.parameters()) for name, part in zip(names, (model[:2], model[2:]), strict=True)]


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    return deepcopy((model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_optimizers_equal_the_loop_by_hand_to_the_bit(precision: str, clip: float | None, names: Sequence[str]) -> None:
    (hand, optimizers), (model, mine) = pair(names), pair(names)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=precision == "fp16")
    made = LossScaler(init_scale=64.0, growth_interval=2) if precision == "fp16" else None
    amp = MixedPrecision(model, mine, precision, max_grad_norm=clip, scaler=made)
    assert amp.optimizers == tuple(mine)
    assert amp.optimizer is mine[0]
    for x, y in make_batches(5):
        hand.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if precision == "fp16" else torch.bfloat16, enabled=precision != "fp32"):
            loss = loss_of(hand, x, y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        norm = None
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(hand.parameters(), clip).item()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        record = amp.train_step(lambda x, y: loss_of(model, x, y), x, y)
        assert record.grad_norm == norm
        assert not record.skipped
    assert same_state(state_of(model, mine), state_of(hand, optimizers))
    assert amp.stats().steps == 5
    if made is not None:
        assert made.get_scale() == scaler.get_scale() == 256.0


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_none_steps_when_the_gradients_of_one_are_not_finite(precision: str, names: Sequence[str], part: int) -> None:
    model, optimizers = pair(names)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    amp = MixedPrecision(model, optimizers, precision, scheduler=schedulers)
    (x, y), *_ = make_batches(1)
    weight: Tensor = optimizers[part].param_groups[0]["params"][-1]
    for factor in (1.0, INF, 1.0):
        before = state_of(model, optimizers)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        record = amp.train_step(lambda x, y, factor=factor: loss_of(model, x, y) * 1e-3 + (weight * factor).sum() * 1e-3, x, y)
        assert record.skipped == (factor == INF)
        assert same_state(state_of(model, optimizers), before) == record.skipped
        moved = 1.0 if record.skipped else 0.5
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [rate * moved for rate in rates]
    assert (amp.stats().steps, amp.stats().skips) == (3, 1)


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_without_gradients_holds_up_nobody(precision: str, names: Sequence[str]) -> None:
    model, optimizers = pair(names)
    amp = MixedPrecision(model, optimizers, precision, max_grad_norm=1.0)
    first = [parameter.clone() for parameter in optimizers[0].param_groups[0]["params"]]
    for factor in (1.0, INF, 1.0):
        record = amp.train_step(lambda factor=factor: model[3](torch.ones(2, 8)).float().mean() * factor * 1e-3)  # type: ignore[index]
        assert record.skipped == (factor == INF)
    assert all(torch.equal(now, then) for now, then in zip(optimizers[0].param_groups[0]["params"], first, strict=True))


def test_what_is_no_sequence_of_optimizers_is_refused() -> None:
    model = make_net()
    with pytest.raises(ConfigurationError, match=r"MixedPrecision\(optimizer=\[\]\): at least one optimizer is needed"):
        MixedPrecision(model, [], "fp32")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InvalidTypeError, match=r"takes a torch\.optim\.Optimizer, or several, not a StepLR"):
        MixedPrecision(model, [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)], "fp32")  # type: ignore[list-item]


def gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)), nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def score(discriminator: nn.Module, x: Tensor, *, real: bool) -> Tensor:
    out = discriminator(x)
    return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))


LATENT = torch.randn(6, 3, generator=torch.Generator().manual_seed(8))
REAL = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))


def d_loss(generator: nn.Module, discriminator: nn.Module) -> Tensor:
    return score(discriminator, REAL, real=True) + score(discriminator, generator(LATENT).detach(), real=False)


def g_loss(generator: nn.Module, discriminator: nn.Module) -> Tensor:
    return score(discriminator, generator(LATENT), real=True)


def engines(scaler: Any, nets: Sequence[nn.Module], *, optimizer: str = "momentum", **settings: Any) -> list[MixedPrecision]:
    return [MixedPrecision(net, OPTIMIZERS[optimizer](net.parameters()), "fp16", scaler=scaler, **settings) for net in nets]


@pytest.mark.parametrize("critics", [1, 5])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
def test_two_engines_with_one_scaler_equal_the_loop_by_hand_to_the_bit(optimizer: str, scaler: Any, critics: int) -> None:
    """By hand: `update()` once per round, or after each step of a critic that steps again before its generator does."""
    factors = [1.0, INF, 1.0, 1.0, 1.0, INF, 1.0] * critics
    hand, mine = gan(), gan()
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in hand]
    plain, shared = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3), scaler("cpu", init_scale=1024.0, growth_interval=3)
    amp_g, amp_d = engines(shared, mine, optimizer=optimizer)

    def by_hand(which: int, loss: Callable[..., Tensor], factor: float, *, update: bool) -> None:
        for net in hand:
            net.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(*hand) * factor
        plain.scale(value).backward()  # type: ignore[no-untyped-call]
        plain.step(optimizers[which])
        if update:
            plain.update()

    upcoming = iter(factors)
    for round_ in range(len(factors) // critics):
        for number in range(critics):
            factor = next(upcoming)
            by_hand(1, d_loss, factor, update=number < critics - 1)
            record = amp_d.train_step(lambda factor=factor: d_loss(*mine) * factor)
            assert record.skipped == (factor == INF)
        factor = INF if round_ == 3 else 1.0
        by_hand(0, g_loss, factor, update=True)
        record = amp_g.train_step(lambda factor=factor: g_loss(*mine) * factor)
        assert record.skipped == (factor == INF)
        assert shared.get_scale() == plain.get_scale(), round_
    assert same_state(state_of(nn.ModuleList(mine), []), state_of(nn.ModuleList(hand), []))
    assert shared.get_scale() != 1024.0
    theirs = shared.state_dict()
    assert {name: theirs[name] for name in plain.state_dict()} == plain.state_dict()


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_scale_moves_once_per_round(scaler: Any) -> None:
    shared = scaler("cpu", init_scale=1.0, growth_interval=1)
    nets = [nn.Linear(1, 1) for _ in range(3)]
    amps = engines(shared, nets)
    scales = []
    for _ in range(3):
        for amp, net in zip(amps, nets, strict=True):
            scales.append(amp.train_step(lambda net=net: net(torch.ones(1, 1)).float().sum()).scale)
    assert scales == [1.0] * 3 + [2.0] * 3 + [4.0] * 3
    assert shared.get_scale() == 8.0


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def loss(self) -> Tensor:
        return self.weight.sum()


@pytest.mark.parametrize("scaler", SCALERS)
@given(counts=st.lists(st.integers(1, 3), min_size=2, max_size=3), order=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
@example(counts=[2, 2], order=[(0, False), (0, False), (1, False), (0, False), (1, False), (0, False)])
@hypothesis_settings(max_examples=30)
def test_in_any_order_of_micro_batches_all_gradients_have_one_scale(scaler: Any, counts: list[int], order: list[tuple[int, bool]]) -> None:
    """A gradient of exactly 1 in each micro-batch moves the weights by exactly 1 in each step, however the scale moves between them."""
    shared = scaler("cpu", init_scale=4.0, growth_interval=1)
    models = [Weight() for _ in counts]
    amps = [
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", scaler=shared, accumulate=count)
        for model, count in zip(models, counts, strict=True)
    ]
    taken, pending, bad = [0] * len(counts), [0] * len(counts), [False] * len(counts)
    for number, overflow in order:
        which = number % len(counts)
        before = shared.get_scale()
        amps[which].backward(models[which].loss() * (INF if overflow else 1.0))
        others = any(pending[:which] + pending[which + 1 :])
        assert shared.get_scale() == before or not any(pending), "the scale moved under gradients"
        pending[which] += 1
        bad[which] |= overflow
        before = shared.get_scale()
        record = amps[which].step()
        assert shared.get_scale() == before or not others, "the scale moved under the gradients of another engine"
        if record is not None:
            assert record.skipped == bad[which]
            taken[which] += not record.skipped
            pending[which], bad[which] = 0, False
    for model, steps in zip(models, taken, strict=True):
        assert model.weight.tolist() == [-float(steps)] * 2


@pytest.mark.parametrize("scaler", SCALERS)
def test_an_engine_that_is_gone_holds_up_nobody(scaler: Any) -> None:
    shared = scaler("cpu", init_scale=1.0, growth_interval=1)
    models = [Weight() for _ in range(3)]
    amps = engines(shared, models, optimizer="sgd")
    amps[1].backward(models[1].loss())  # It has gradients,
    amps[0].train_step(models[0].loss)
    assert shared.get_scale() == 1.0
    del amps[1:]  # and is gone with them, as one that has never done anything is.
    gc.collect()
    assert [amps[0].train_step(models[0].loss).scale for _ in range(3)] == [2.0, 4.0, 8.0]
    assert shared.get_scale() == 16.0


def test_one_that_is_never_used_holds_up_nobody_for_long() -> None:
    shared = LossScaler(init_scale=1.0, growth_interval=1)
    models = [Weight(), Weight()]
    amp, idle = engines(shared, models, optimizer="sgd")
    assert [amp.train_step(models[0].loss).scale for _ in range(3)] == [1.0, 2.0, 4.0]
    assert idle.train_step(models[1].loss).scale == 4.0
    assert shared.get_scale() == 8.0


def test_a_step_that_is_tried_again_has_the_scale_that_the_skip_has_lowered() -> None:
    shared = LossScaler(init_scale=64.0)
    models = [Weight(), Weight()]
    amp, _idle = engines(shared, models, optimizer="sgd", retries=2)
    factors = iter([INF, INF, 1.0])
    record = amp.train_step(lambda: models[0].loss() * next(factors))
    assert (record.step, record.skipped, record.scale) == (3, False, 16.0)


@pytest.mark.parametrize("where", ["forward", "step"])
def test_an_engine_that_failed_holds_up_nobody(where: str) -> None:
    shared = LossScaler(init_scale=1.0, growth_interval=1)
    models = [Weight(), Weight()]
    amps = engines(shared, models, optimizer="sgd", accumulate=2)

    def fail(*_: Any) -> None:
        raise ValueError("failed")

    amps[0].backward(models[0].loss())
    if where == "forward":
        models[0].weight.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="failed"):
            amps[0].backward(models[0].loss())
    else:
        amps[0].backward(models[0].loss())
        amps[0].optimizer.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match="failed"):
            amps[0].step()
    for _ in range(2):
        for _ in range(2):
            amps[1].backward(models[1].loss())
            record = amps[1].step()
        assert record is not None
    assert shared.get_scale() == 2.0
