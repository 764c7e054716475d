"""A step that breaks off, wherever it does, leaves an engine that goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.engine.recording import Recorder
from halfstep.errors import StepOrderError
from halfstep.scaler import LossScaler
from tests.engine.loops import OPTIMIZERS, loss_of, make_batches, make_net, same_state

PRECISIONS = ["fp32", "bf16", "fp16"]
BATCH = make_batches(1)[0]


class Unlucky:
    """Fails once, when it is told to."""

    def __init__(self) -> None:
        self.error: type[BaseException] | None = None

    def __call__(self, *_: Any) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error("no luck")


class Schedule:
    def __init__(self, luck: Unlucky) -> None:
        self.luck = luck
        self.moves = 0

    def step(self) -> None:
        self.luck()
        self.moves += 1


class Broken:
    """An engine that can be made to fail at one place."""

    def __init__(self, where: str, precision: str, optimizer: str, accumulate: int) -> None:
        self.luck, idle = Unlucky(), Unlucky()
        at: Callable[[str], Unlucky] = lambda place: self.luck if place == where else idle  # noqa: E731
        model: Any = make_net()
        model[2].register_forward_hook(at("forward"))
        model[0].weight.register_hook(at("backward"))
        self.model: nn.Module = model
        made = OPTIMIZERS[optimizer](model.parameters())
        made.register_step_pre_hook(at("optimizer"))
        made.register_step_post_hook(at("after the optimizer"))
        self.schedule = Schedule(at("scheduler"))
        self.calls: list[int] = []
        scaler = LossScaler(init_scale=256.0, growth_interval=2) if precision == "fp16" else None
        self.amp = MixedPrecision(
            model,
            made,
            precision,
            scaler=scaler,
            accumulate=accumulate,
            max_grad_norm=0.1,
            scheduler=self.schedule,
            on_step=[at("on_step"), lambda record: self.calls.append(record.step)],
        )

    def step(self, *, by_hand: bool) -> None:
        amp = self.amp
        if not by_hand:
            amp.train_step(lambda x, y: loss_of(amp.model, x, y), *BATCH)
            return
        for x, y in zip(*(each.chunk(amp.accumulate) for each in BATCH), strict=True):
            with amp.autocast():
                loss = loss_of(amp.model, x, y)
            amp.backward(loss)
            amp.step()

    def state(self) -> Any:
        amp = self.amp
        return amp.model.state_dict(), amp.optimizer.state_dict(), amp.state_dict()


BEFORE_THE_STEP = ["forward", "backward", "optimizer"]
AFTER_THE_STEP = ["scheduler", "on_step"]


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", [*BEFORE_THE_STEP, *AFTER_THE_STEP])
def test_the_next_step_is_what_it_would_have_been(
    where: str, precision: str, optimizer: str, accumulate: int, error: type[BaseException], by_hand: bool
) -> None:
    broken, whole = (Broken(where, precision, optimizer, accumulate) for _ in range(2))
    for each in (broken, whole):
        each.step(by_hand=by_hand)
    broken.luck.error = error
    with pytest.raises(error, match="no luck"):
        broken.step(by_hand=by_hand)
    assert all(parameter.grad is None for parameter in broken.model.parameters()) or (where == "forward" and by_hand)
    with pytest.raises(StepOrderError, match="there are no gradients"):
        broken.amp.step()
    if where in AFTER_THE_STEP:
        whole.step(by_hand=by_hand)
        assert broken.schedule.moves == (1 if where == "scheduler" else 2)
        assert broken.calls == [1]
    for _ in range(2):
        for each in (broken, whole):
            each.step(by_hand=by_hand)
    assert same_state(broken.state(), whole.state())
    assert broken.amp.stats() == whole.amp.stats()


def test_what_an_optimizer_did_before_it_failed_is_not_undone_as_in_torchs_own_loop() -> None:
    broken = Broken("after the optimizer", "fp16", "adamw", 1)
    before = {name: value.clone() for name, value in broken.model.state_dict().items()}
    broken.luck.error = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        broken.step(by_hand=False)
    assert not same_state(broken.model.state_dict(), before)
    assert broken.amp.stats().steps == 0
    broken.step(by_hand=False)
    assert broken.amp.stats().steps == 1


def test_an_interruption_while_the_record_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    amp = Broken("", "fp16", "adamw", 1).amp
    record = Recorder.record
    luck = Unlucky()
    luck.error = KeyboardInterrupt

    def interrupted(*args: Any, **settings: Any) -> Any:
        luck()
        return record(*args, **settings)

    monkeypatch.setattr(Recorder, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        amp.train_step(lambda x, y: loss_of(amp.model, x, y), *BATCH)
    assert [amp.train_step(lambda x, y: loss_of(amp.model, x, y), *BATCH).step for _ in range(2)] == [2, 3]
    assert amp.stats().steps == 3


def test_a_batch_that_is_too_large_is_tried_again_in_halves() -> None:
    """The common way out of it, in one loop."""
    model = nn.Linear(5, 3)
    x, y = make_batches(1, size=8)[0]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("too large")
        return loss_of(model, x, y)

    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for attempt in (x, x[:4]):
        try:
            record = amp.train_step(loss, attempt, y[: len(attempt)])
        except torch.OutOfMemoryError:
            continue
    assert record.step == 1
    assert not record.skipped
