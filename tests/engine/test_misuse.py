"""What goes wrong in a loop by hand, without a word: here it raises, or cannot happen."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.engine import MixedPrecision
from halfstep.errors import StepOrderError, UnscaledBackwardError
from halfstep.records import StepRecord
from halfstep.scaler import LossScaler
from tests.engine.loops import loss_of, make_batches, make_net, same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]
BATCH = make_batches(1)[0]


def engine(precision: str = "fp16", *, scaler: Any = None, model: nn.Module | None = None, **settings: Any) -> MixedPrecision:
    model = make_net() if model is None else model
    if precision == "fp16" and scaler is None:
        scaler = LossScaler(init_scale=2.0**10)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), precision, scaler=scaler, **settings)


def loss(amp: MixedPrecision) -> Any:
    with amp.autocast():
        return loss_of(amp.model, *BATCH)


def finish(amp: MixedPrecision) -> StepRecord:
    record = amp.step()
    assert record is not None
    return record


def check_untouched_and_usable(amp: MixedPrecision, **settings: Any) -> None:
    """Nothing was stepped, and what follows is what a fresh engine does."""
    fresh = engine(amp.precision, **settings)
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())
    records = [each.train_step(lambda x, y, each=each: loss_of(each.model, x, y), *BATCH) for each in (amp, fresh)]
    assert records[0].loss == records[1].loss
    assert records[0].step == 1
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())
    assert amp.stats() == fresh.stats()


CLEARED = r"They were cleared; nothing was stepped\."


@pytest.mark.parametrize("scaler", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("call", ["step", "unscale_gradients"])
def test_a_backward_pass_beside_the_engine_is_noticed(call: str, scaler: Any) -> None:
    amp = engine(scaler=scaler("cpu", init_scale=2.0**10))
    loss(amp).backward()
    with pytest.raises(UnscaledBackwardError, match=rf"{call}\(\) found gradients that amp\.backward\(\) did not compute\. .* {CLEARED}"):
        getattr(amp, call)()
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    with pytest.raises(StepOrderError, match=rf"{call}\(\) was called before backward\(loss\)"):
        getattr(amp, call)()
    if scaler is LossScaler:
        check_untouched_and_usable(amp)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("which", [0, 5])
def test_one_that_is_mixed_with_the_engines_own_is_noticed(which: int, accumulate: int) -> None:
    """The other loss, unscaled, reaches a single parameter."""
    amp = engine(accumulate=accumulate)
    amp.backward(loss(amp))
    [*amp.model.parameters()][which].square().sum().backward()  # type: ignore[no-untyped-call]
    following = loss(amp)
    with pytest.raises(UnscaledBackwardError, match=rf"Gradients changed after amp\.backward\(\), while .* {CLEARED}"):
        amp.step() if accumulate == 1 else amp.backward(following)
    check_untouched_and_usable(amp, accumulate=accumulate)


def test_one_after_zero_grad_is_noticed() -> None:
    """Its gradients may lie where those of the engine lay."""
    for _ in range(10):
        amp = engine(model=nn.Linear(5, 3))
        amp.backward(loss(amp))
        amp.optimizer.zero_grad()
        loss(amp).backward()
        with pytest.raises(UnscaledBackwardError, match=r"Gradients changed after amp\.backward\(\)"):
            amp.step()


def test_many_parameters_are_watched_by_a_sample() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
    amp = engine(model=model)
    with amp.autocast():
        total = sum(layer(torch.ones(1, 1)).float().sum() for layer in model)
    amp.backward(total)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(UnscaledBackwardError, match=CLEARED):
        amp.step()


@pytest.mark.parametrize(
    "edit",
    [
        lambda amp: nn.utils.clip_grad_norm_(amp.model.parameters(), 1.0),
        lambda amp: nn.utils.clip_grad_value_(amp.model.parameters(), 1.0),
        lambda amp: [parameter.grad.add_(0.1) for parameter in amp.model.parameters()],
        lambda amp: amp.optimizer.zero_grad(),
        lambda amp: next(amp.model.parameters()).grad.zero_(),
        lambda amp: setattr(next(amp.model.parameters()), "grad", torch.ones(8, 5)),
    ],
    ids=["clip norm", "clip value", "noise", "zero_grad", "zero one", "replace one"],
)
def test_scaled_gradients_that_were_edited_are_refused_and_unscaled_ones_are_not(edit: Callable[[MixedPrecision], Any]) -> None:
    amp = engine()
    amp.backward(loss(amp))
    edit(amp)
    with pytest.raises(UnscaledBackwardError, match=r"they were clipped or edited while scaled: use max_grad_norm, or call amp\.un"):
        amp.step()
    check_untouched_and_usable(amp)
    for precision in PRECISIONS:
        amp = engine(precision)
        amp.backward(loss(amp))
        if precision == "fp16":
            amp.unscale_gradients()
        edit(amp)
        assert not finish(amp).skipped


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_by_hand_after_unscaling_is_what_max_grad_norm_does(precision: str, accumulate: int) -> None:
    clipping, by_hand = engine(precision, max_grad_norm=0.05, accumulate=accumulate), engine(precision, accumulate=accumulate)
    for _ in range(3):
        for each in (clipping, by_hand):
            for number in range(accumulate):
                each.backward(loss(each))
                if each is by_hand and number == accumulate - 1:
                    each.unscale_gradients()
                    each.unscale_gradients()  # Twice is once.
                    norm = nn.utils.clip_grad_norm_(each.model.parameters(), 0.05)
                record = each.step()
            if each is clipping:
                expected = record
        assert expected is not None
        assert norm.item() == expected.grad_norm
        assert norm > 0.05
    assert same_state(clipping.model.state_dict(), by_hand.model.state_dict())


def test_gradients_are_the_mean_over_the_micro_batches_that_there_are_when_they_are_unscaled_early() -> None:
    amp = engine("fp16", accumulate=4)
    whole = engine("fp16")
    whole.backward(loss(whole))
    whole.unscale_gradients()
    for _ in amp.micro_batches(range(1)):
        amp.backward(loss(amp))
        amp.unscale_gradients()
        for mine, other in zip(amp.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=1e-5)
        assert amp.step() is not None
    whole.step()
    for mine, other in zip(amp.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scaler", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_what_enters_after_unscaling_is_noticed(bad: float, scaler: Any, fused: bool) -> None:
    model = make_net()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), "fp16", scaler=scaler("cpu", init_scale=64.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    amp.backward(loss(amp))
    amp.unscale_gradients()
    gradient = [*model.parameters()][-1].grad
    assert gradient is not None
    gradient[1] = bad
    assert finish(amp).skipped
    assert same_state(model.state_dict(), before)
    assert amp.scaler is not None
    assert amp.scaler.get_scale() == 32.0


def test_micro_batches_after_unscaling_are_refused() -> None:
    amp = engine(accumulate=2)
    amp.backward(loss(amp))
    with pytest.raises(StepOrderError, match=r"unscale_gradients\(\) was called after 1 of accumulate=2 micro-batches; the others"):
        amp.unscale_gradients()
    amp = engine(accumulate=3)
    for _ in amp.micro_batches(range(1)):
        amp.backward(loss(amp))
        amp.unscale_gradients()
        with pytest.raises(StepOrderError, match=r"backward\(\) was called after unscale_gradients\(\), when gradients are no"):
            amp.backward(loss(amp))
        assert amp.step() is not None


REGIONS: dict[str, Callable[[MixedPrecision], Any]] = {
    "torch's": lambda amp: torch.autocast("cpu", dtype=torch.bfloat16),
    "the engine's": lambda amp: amp.autocast(),
}


@pytest.mark.parametrize("call", ["step", "train_step", "flush", "unscale_gradients"])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_in_an_autocast_region_is_refused(precision: str, region: str, call: str) -> None:
    if precision == "fp32" and region == "the engine's":
        return  # It switches autocast off.
    amp = engine(precision)
    match = rf"{call}\(\) was called inside an autocast region\. .* until the region ends, so that the loss would not move"
    with REGIONS[region](amp):
        if call != "train_step":
            amp.backward(loss(amp))
        with pytest.raises(StepOrderError, match=match):
            amp.train_step(lambda: loss_of(amp.model, *BATCH)) if call == "train_step" else getattr(amp, call)()
    check_untouched_and_usable(amp)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_region_that_keeps_no_copies_is_no_trap(precision: str) -> None:
    amp, fresh = engine(precision), engine(precision)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            amp.backward(loss(amp))  # Its derivatives are computed outside of the region all the same.
            amp.step()
        fresh.train_step(lambda: loss_of(fresh.model, *BATCH))
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_backward_pass_in_the_region_of_the_forward_pass_is_computed_outside_of_it(precision: str) -> None:
    inside, outside = engine(precision), engine(precision)
    with inside.autocast():
        inside.backward(loss_of(inside.model, *BATCH))
        assert torch.is_autocast_enabled("cpu") == (precision != "fp32")
    outside.backward(loss(outside))
    for each in (inside, outside):
        finish(each)
    assert same_state(inside.model.state_dict(), outside.model.state_dict())


def test_a_leftover_optimizer_step_after_the_engines_changes_nothing() -> None:
    amp, fresh = engine(), engine()
    for factor in (1.0, INF, 1.0):
        for each in (amp, fresh):
            each.backward(loss(each) * factor)
            each.step()
        amp.optimizer.step()
        assert same_state(amp.model.state_dict(), fresh.model.state_dict())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_step_in_place_of_the_engines_is_refused_before_it_does_harm(precision: str, accumulate: int, fused: bool) -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    amp = MixedPrecision(model, optimizer, precision, accumulate=accumulate)
    amp.train_step(lambda x, y: loss_of(model, x, y), *BATCH)
    before = copy.deepcopy(model.state_dict())
    for _ in range(accumulate):
        amp.backward(loss(amp))
        with pytest.raises(StepOrderError, match=r"AdamW\.step\(\) was called after amp\.backward\(\)"):
            optimizer.step()
        assert same_state(model.state_dict(), before)
        record = amp.step()
    assert record is not None
    assert not record.skipped
    assert not same_state(model.state_dict(), before)
    optimizer.step()  # Between steps it is nobody's business; there are no gradients.


def test_an_engine_that_was_left_in_the_middle_of_a_step_does_not_stop_the_next() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = MixedPrecision(model, optimizer, "fp32", accumulate=2)
    left.backward(loss(left))
    amp = MixedPrecision(model, optimizer, "fp32")
    assert not amp.train_step(lambda x, y: loss_of(model, x, y), *BATCH).skipped
    assert left.accumulate == 2


def test_an_engine_that_is_gone_leaves_nothing_on_its_optimizer() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, "fp32", accumulate=2)
    amp.backward(loss(amp))
    del amp
    gc.collect()
    optimizer.step()


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    amp, fresh = engine(accumulate=2), engine(accumulate=2)
    amp.backward(loss(amp) * 3)
    amp.discard()
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    amp.discard()  # Nothing is in progress, which is no error.
    for each in (amp, fresh):
        each.train_step(lambda x, y, each=each: loss_of(each.model, x, y), *BATCH)
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())


@pytest.mark.parametrize("scaler", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("load", [True, False])
def test_a_scale_that_is_changed_between_micro_batches_is_noticed(load: bool, scaler: Any) -> None:
    made = scaler("cpu", init_scale=2.0**10)
    amp = engine(scaler=made, accumulate=2)
    amp.backward(loss(amp))
    amp.step()
    if load:
        made.load_state_dict({**made.state_dict(), "scale": 8.0})
    else:
        made.update(8.0)
    with pytest.raises(UnscaledBackwardError, match=r"The loss scale was changed after amp\.backward\(\), .* 1 of accumulate=2 micro"):
        amp.backward(loss(amp))
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    made.update(16.0)  # Between steps it is allowed.
    assert amp.train_step(lambda x, y: loss_of(amp.model, x, y), *BATCH).scale == 16.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_engines_backward_pass_into_pending_gradients_is_noticed_where_they_are_scaled(precision: str) -> None:
    """A generator's loss runs through the discriminator, whose micro-batches are pending."""
    generator, discriminator = nn.Linear(2, 5), nn.Linear(5, 3)
    amps = [engine(precision, model=net, accumulate=2) for net in (generator, discriminator)]

    def generator_loss() -> Any:
        with amps[0].autocast():
            return discriminator(generator(torch.ones(2, 2))).float().mean()

    amps[1].backward(loss(amps[1]))
    amps[0].backward(generator_loss())
    if precision != "fp16":
        amps[1].backward(loss(amps[1]))
        assert amps[1].step() is not None
        return
    with pytest.raises(UnscaledBackwardError, match=CLEARED):
        amps[1].backward(loss(amps[1]))
    amps[0].backward(generator_loss())
    assert not finish(amps[0]).skipped
    for _ in range(2):  # What the generator's loss left in the discriminator is cleared.
        amps[1].backward(loss(amps[1]))
        record = amps[1].step()
    assert record is not None
    assert not record.skipped
