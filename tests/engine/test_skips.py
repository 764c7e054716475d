from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from tests.engine.loops import OPTIMIZERS, Run, by_train_step, loss_of, make_batches, make_net, same_state, snapshot

INF = float("inf")
NAN = float("nan")


def start(optimizer: str = "momentum", *, scale: float = 2.0**10, **settings: object) -> tuple[Run, MixedPrecision]:
    run = Run.start(optimizer, precision="fp16")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    amp = MixedPrecision(run.model, run.optimizer, "fp16", scheduler=run.scheduler, scaler=run.scaler, **settings)  # type: ignore[arg-type]
    return run, amp


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_leaves_every_bit_as_it_was(optimizer: str, clip: float | None, bad: float) -> None:
    run, amp = start(optimizer, max_grad_norm=clip)
    for number, ((x, y), factor) in enumerate(zip(make_batches(5), [1.0, bad, 1.0, bad, bad], strict=True)):
        before = snapshot(run)
        record = amp.train_step(lambda x, y, factor=factor: loss_of(run.model, x, y, factor), x, y)
        assert record.step == number + 1
        assert record.skipped == (factor != 1.0)
        assert same_state(snapshot(run), before) == record.skipped
        assert all(parameter.grad is None for parameter in run.model.parameters())


def test_the_record_has_the_scale_that_the_step_was_computed_with() -> None:
    run, amp = start(scale=2.0**8)
    assert run.scaler is not None
    seen = []
    for (x, y), factor in zip(make_batches(4), [1.0, INF, INF, 1.0], strict=True):
        before = run.scaler.get_scale()
        record = amp.train_step(lambda x, y, factor=factor: loss_of(run.model, x, y, factor), x, y)
        assert record.scale == before
        seen.append((record.scale, record.skipped, run.scaler.get_scale()))
    assert seen == [(256.0, False, 256.0), (256.0, True, 128.0), (128.0, True, 64.0), (64.0, False, 64.0)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_real_overflow_of_fp16_is_skipped(optimizer: str) -> None:
    run, amp = start(optimizer)
    (x, y), *_ = make_batches(1)
    before = snapshot(run)
    record = amp.train_step(lambda x, y: nn.functional.cross_entropy(run.model[3](x @ torch.ones(5, 8) * 3e4), y), x, y)  # type: ignore[index]
    assert record.skipped
    assert same_state(snapshot(run), before)
    assert not amp.train_step(lambda x, y: loss_of(run.model, x, y), x, y).skipped


def test_a_scale_that_is_too_large_is_halved_until_the_first_step_is_taken() -> None:
    run, amp = start(scale=2.0**30)
    (x, y), *_ = make_batches(1)
    records = [amp.train_step(lambda x, y: loss_of(run.model, x, y), x, y) for _ in range(20)]
    flags = [record.skipped for record in records]
    assert flags[0]
    assert not flags[-1]
    assert flags == sorted(flags, reverse=True)
    assert [record.scale for record in records[: flags.count(True) + 1]] == [2.0 ** (30 - n) for n in range(flags.count(True) + 1)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["StepLR", "ExponentialLR", "CosineAnnealingLR"])
def test_an_overflow_in_the_first_step_raises_no_warning_of_the_scheduler(optimizer: str, schedule: str) -> None:
    model = make_net()
    made = OPTIMIZERS[optimizer](model.parameters())
    makers: dict[str, Callable[[], torch.optim.lr_scheduler.LRScheduler]] = {
        "StepLR": lambda: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
        "ExponentialLR": lambda: torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
        "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(made, 10),
    }
    scheduler = makers[schedule]()
    amp = MixedPrecision(model, made, "fp16", scheduler=scheduler)
    (x, y), *_ = make_batches(1)
    first = amp.train_step(lambda x, y: loss_of(model, x, y, INF), x, y)  # pytest turns the warning into an error
    second = amp.train_step(lambda x, y: loss_of(model, x, y), x, y)
    third = amp.train_step(lambda x, y: loss_of(model, x, y), x, y)
    assert [record.skipped for record in (first, second, third)] == [True, False, False]
    assert first.lr == second.lr > third.lr


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw-fused"])
def test_a_skip_is_known_where_the_scale_does_not_show_it(optimizer: str) -> None:
    run = Run.start(optimizer, precision="fp16")
    # The smallest backoff that is one: 256 * (1 - 2**-53) rounds to 256 in fp32, so the scale stays through skips.
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, backoff_factor=1 - 2.0**-53, growth_interval=1)
    amp = MixedPrecision(run.model, run.optimizer, "fp16", scaler=scaler)
    (x, y), *_ = make_batches(1)
    assert amp.train_step(lambda x, y: loss_of(run.model, x, y, INF), x, y).skipped
    assert scaler.get_scale() == 256.0
    assert not amp.train_step(lambda x, y: loss_of(run.model, x, y), x, y).skipped
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw-fused"])
@pytest.mark.parametrize("new_scale", [4.0, 2.0**12])
def test_a_manual_update_of_the_scale_does_not_confuse_the_skips(optimizer: str, new_scale: float) -> None:
    run, amp = start(optimizer)
    assert run.scaler is not None
    flags = []
    for (x, y), factor in zip(make_batches(6), itertools.cycle([1.0, INF]), strict=False):
        record = amp.train_step(lambda x, y, factor=factor: loss_of(run.model, x, y, factor), x, y)
        flags.append((record.skipped, record.scale))
        run.scaler.update(new_scale)
    assert flags == [(False, 2.0**10), (True, new_scale), *[(False, new_scale), (True, new_scale)] * 2]


def test_an_inf_in_one_micro_batch_skips_the_whole_step() -> None:
    run, amp = start(accumulate=3)
    before = snapshot(run)
    parts = iter([1.0, INF, 1.0])
    (x, y), *_ = make_batches(1)
    record = amp.train_step(lambda x, y: loss_of(run.model, x, y, next(parts)), x, y)
    assert record.skipped
    assert record.loss == INF
    assert same_state(snapshot(run), before)


def test_what_an_inf_left_in_the_gradients_does_not_reach_the_next_step() -> None:
    run, amp = start()
    (x, y), *_ = make_batches(1)
    flags = [amp.train_step(lambda x, y, f=f: loss_of(run.model, x, y, f), x, y).skipped for f in [INF, 1.0, NAN, 1.0]]
    assert flags == [True, False, True, False]


@given(
    flags=st.lists(st.booleans(), max_size=25), growth_interval=st.integers(1, 4), fused=st.booleans(), clip=st.sampled_from([None, 1.0])
)
@hypothesis_settings(max_examples=40)
def test_the_scale_agrees_with_a_plain_scaler_for_any_sequence_of_overflows(
    flags: list[bool], growth_interval: int, fused: bool, clip: float | None
) -> None:
    plain_weight, weight = nn.Parameter(torch.ones(2)), nn.Linear(2, 1, bias=False)
    plain_optimizer = torch.optim.SGD([plain_weight], lr=0.0)
    plain = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
    amp = MixedPrecision(weight, torch.optim.SGD(weight.parameters(), lr=0.0, fused=fused), "fp16", scaler=scaler, max_grad_norm=clip)
    records = []
    for overflow in flags:
        factor = INF if overflow else 1.0
        plain.scale((plain_weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        plain.step(plain_optimizer)
        plain.update()
        plain_optimizer.zero_grad()
        records.append(amp.train_step(lambda factor=factor: (weight.weight * factor).sum()))
        assert scaler.get_scale() == plain.get_scale()
    assert [record.skipped for record in records] == flags
    assert sum(record.skipped for record in records) == sum(flags)
    assert scaler.state_dict() == plain.state_dict()


def test_two_engines_keep_two_scales() -> None:
    """A generator and its discriminator: each loss leaves gradients in both models, each engine steps its own."""
    latent = torch.randn(6, 3)
    (real, _), *_ = make_batches(1)

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(3, 5), nn.Linear(5, 1)

    def score(discriminator: nn.Module, x: Tensor, *, real: bool) -> Tensor:
        out = discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))

    generator, discriminator = nets()
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100) for scale in (64.0, 1024.0)]
    amps = [
        MixedPrecision(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp16", scaler=scaler, max_grad_norm=10.0)
        for net, scaler in zip((generator, discriminator), scalers, strict=True)
    ]
    factors = [1.0, INF, 1.0]
    seen = []
    for factor in factors:
        g = amps[0].train_step(lambda factor=factor: score(discriminator, generator(latent), real=True) * factor)
        d = amps[1].train_step(lambda: score(discriminator, real, real=True) + score(discriminator, generator(latent).detach(), real=False))
        seen.append(((g.skipped, g.scale), (d.skipped, d.scale)))
    assert seen == [((False, 64.0), (False, 1024.0)), ((True, 64.0), (False, 1024.0)), ((False, 32.0), (False, 1024.0))]

    hand_g, hand_d = nets()
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (hand_g, hand_d)]
    plain = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100) for scale in (64.0, 1024.0)]
    for factor in factors:
        for which in range(2):
            hand_g.zero_grad()
            hand_d.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (
                    score(hand_d, hand_g(latent), real=True) * factor
                    if which == 0
                    else score(hand_d, real, real=True) + score(hand_d, hand_g(latent).detach(), real=False)
                )
            plain[which].scale(loss).backward()  # type: ignore[no-untyped-call]
            plain[which].unscale_(opts[which])
            nn.utils.clip_grad_norm_((hand_g, hand_d)[which].parameters(), 10.0)
            plain[which].step(opts[which])
            plain[which].update()
    assert same_state(generator.state_dict(), hand_g.state_dict())
    assert same_state(discriminator.state_dict(), hand_d.state_dict())


def test_the_scale_grows_after_its_interval_of_good_steps() -> None:
    run = Run.start("sgd", precision="fp16", growth_interval=2)
    by_train_step(run, make_batches(6), precision="fp16", clip=None, accumulate=1, factors=[1.0, INF, 1.0, 1.0, 1.0, 1.0])
    assert run.scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]


def test_a_scale_that_fell_out_of_range_destroys_no_weights() -> None:
    """After 144 skips the scale is 2**-128, and 1 / scale is inf: torch's check, which comes before the division, sees a good step."""
    run, amp = start(scale=2.0**16)
    (x, y), (good_x, good_y) = make_batches(2)
    for _ in range(150):
        assert amp.train_step(lambda x, y: loss_of(run.model, x, y, INF), x, y).skipped
    before = snapshot(run)
    record = amp.train_step(lambda x, y: loss_of(run.model, x, y, 1.0), good_x, good_y)
    assert record.scale < 2.0**-127
    assert record.skipped
    assert same_state(snapshot(run), before)


def test_a_scale_below_one_steps_where_its_gradients_are_finite() -> None:
    run, amp = start(scale=0.5)
    ((x, y),) = make_batches(1)
    assert not amp.train_step(lambda x, y: loss_of(run.model, x, y, 1.0), x, y).skipped
