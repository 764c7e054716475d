"""The step that an engine is in the middle of, moved into another engine."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision, go_on_from, micro_batches_of, progress_of, state_of, trained_parameters
from halfstep.errors import StepOrderError
from halfstep.scaler import LossScaler


def engine(*, seed: int = 0, **settings: Any) -> MixedPrecision:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "fp32", **{"accumulate": 3, **settings})


def micro_batch(amp: MixedPrecision, number: int, *, factor: float = 1.0) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
    with amp.autocast():
        loss = (amp.model(x).square() * factor).mean()
    amp.backward(loss)


def moved(amp: MixedPrecision) -> MixedPrecision:
    """Another engine, which goes on from where this one is."""
    other = engine(seed=1)
    progress = progress_of(amp)
    other.model.load_state_dict(amp.model.state_dict())
    other.optimizer.load_state_dict(deepcopy(amp.optimizer.state_dict()))
    other.load_state_dict(state_of(amp))
    go_on_from(
        None
        if progress is None
        else replace(
            progress,
            gradients={name: each.clone() for name, each in progress.gradients.items()},
            buffers={name: each.clone() for name, each in progress.buffers.items()},
        ),
        engine=other,
    )
    return other


def values(amp: MixedPrecision) -> list[Tensor]:
    return [*amp.model.state_dict().values(), *(state["momentum_buffer"] for state in amp.optimizer.state.values())]


@pytest.mark.parametrize("infinite", [None, 0, 2], ids=["taken", "skipped for what was seen", "skipped for what comes"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_the_step_ends_as_if_it_had_not_been_moved(at: int, infinite: int | None) -> None:
    amp = engine()
    for number in range(3):
        micro_batch(amp, 90 + number)
        amp.step()
    for number in range(at):
        micro_batch(amp, number, factor=float("inf") if number == infinite else 1.0)
        if number < 2:
            assert amp.step() is None
    other = moved(amp)
    assert micro_batches_of(other) == at
    records = []
    for each in (amp, other):
        for number in range(at, 3):
            micro_batch(each, number, factor=float("inf") if number == infinite else 1.0)
            if number < 2:
                assert each.step() is None
        records.append(each.step())
    first, last = records
    assert first is not None
    assert last is not None
    assert first.skipped == last.skipped == (infinite is not None)
    assert first.step == last.step == 2
    torch.testing.assert_close((last.loss, last.grad_norm), (first.loss, first.grad_norm), rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, values(amp), values(other)))


def test_a_group_that_ends_early_goes_on_in_a_loop_over_micro_batches() -> None:
    amp = engine()
    micro_batch(amp, 0)
    assert amp.step() is None
    other = moved(amp)
    records = []
    for each in (amp, other):
        if each is other:
            for number in other.micro_batches(iter([1])):
                micro_batch(other, number)
                records.append(other.step())
        else:
            micro_batch(amp, 1)
            records.extend([amp.step() or amp.flush()])
    assert [record.step for record in records if record] == [1, 1]
    assert all(map(torch.equal, values(amp), values(other)))


def test_a_loop_over_micro_batches_is_not_begun_in_the_middle_of_a_step_of_ones_own() -> None:
    amp = engine()
    micro_batch(amp, 0)
    with pytest.raises(StepOrderError, match=r"micro_batches\(\) was called after 1 of accumulate=3"):
        next(iter(amp.micro_batches(iter([1]))))


def test_between_two_steps_there_is_none() -> None:
    amp = engine()
    assert progress_of(amp) is None
    for number in range(3):
        micro_batch(amp, number)
        amp.step()
    assert progress_of(amp) is None
    assert micro_batches_of(amp) == 0


def test_what_the_optimizer_trains_beside_the_model_has_its_place_for_a_name() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    with pytest.warns(match="parameters are not the model's"):
        amp = MixedPrecision(model, torch.optim.SGD([*model.parameters(), weight], lr=0.1), "fp32", accumulate=2)
    assert list(trained_parameters(amp)) == ["weight", "bias", "optimizer 0, group 0, parameter 2"]
    with amp.autocast():
        loss = model(torch.ones(1, 2)).sum() * weight.sum()
    amp.backward(loss)
    progress = progress_of(amp)
    assert progress is not None
    assert set(progress.gradients) == set(trained_parameters(amp))


def _in_gradient_hook(amp: MixedPrecision, call: Callable[..., None]) -> None:
    next(amp.model.parameters()).register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _before_step(amp: MixedPrecision, call: Callable[..., None]) -> None:
    amp.optimizer.register_step_pre_hook(call)


def _after_step(amp: MixedPrecision, call: Callable[..., None]) -> None:
    amp.optimizer.register_step_post_hook(call)


@pytest.mark.parametrize(("hook", "where"), [(_in_gradient_hook, r"backward\(\)"), (_before_step, r"step\(\)"), (_after_step, r"step\(\)")])
def test_the_middle_of_a_call_is_no_point_to_go_on_from(hook: Callable[..., None], where: str) -> None:
    amp = engine(accumulate=1)
    hook(amp, lambda *_: progress_of(amp) and None)
    with pytest.raises(StepOrderError, match=rf"cannot be saved in the middle of {where}, such as in a hook"):  # noqa: PT012 - which of them raises differs
        micro_batch(amp, 0)
        amp.step()


def test_nor_is_the_middle_of_a_whole_step() -> None:
    amp = engine(accumulate=1)
    amp.model.register_forward_hook(lambda *_: progress_of(amp) and None)
    with pytest.raises(StepOrderError, match=r"in the middle of train_step\(\)"):
        amp.train_step(lambda x: amp.model(x).sum(), torch.ones(5, 3))


def test_a_callback_is_after_the_step() -> None:
    seen: list[Any] = []

    def note() -> None:
        seen.append(progress_of(amp))

    amp = engine(accumulate=1, on_step=note)
    amp.train_step(lambda x: amp.model(x).sum(), torch.ones(5, 3))
    micro_batch(amp, 0)
    amp.step()
    assert seen == [None, None]


def test_nor_are_unscaled_gradients() -> None:
    amp = engine(accumulate=1)
    micro_batch(amp, 0)
    amp.unscale_gradients()
    with pytest.raises(StepOrderError, match=r"between unscale_gradients\(\) and step\(\). Call step\(\) first"):
        progress_of(amp)
    amp.step()
    assert progress_of(amp) is None


@pytest.mark.filterwarnings("ignore:fp16 on this CPU is emulated")
def test_nor_is_the_middle_of_a_round_of_engines_that_share_a_scaler() -> None:
    scaler = LossScaler(init_scale=8.0)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    one, two = (MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", scaler=scaler) for model in models)
    one.train_step(lambda x: one.model(x).sum(), torch.ones(1, 2))
    with pytest.raises(StepOrderError, match=r"1 of the 2 engines that share a loss scaler have stepped.* Save after the last"):
        progress_of(two)
    two.train_step(lambda x: two.model(x).sum(), torch.ones(1, 2))
    assert progress_of(one) is None
