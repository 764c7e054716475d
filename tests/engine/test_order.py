from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepError, InvalidTypeError, StepOrderError
from tests.engine.loops import loss_of, make_batches, make_net, same_state

PRECISIONS = ["fp32", "bf16", "fp16"]


def make(precision: str = "fp32", *, fused: bool = False, **settings: Any) -> MixedPrecision:
    model = make_net()
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused), precision, **settings)


def take_step(amp: MixedPrecision, x: Tensor, y: Tensor, *, manual: bool) -> None:
    if manual:
        amp.backward(loss_of(amp.model, x, y))
        amp.step()
    else:
        amp.train_step(lambda x, y: loss_of(amp.model, x, y), x, y)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_before_a_backward_is_refused(precision: str, accumulate: int) -> None:
    amp = make(precision, accumulate=accumulate)
    for _ in range(2):
        with pytest.raises(StepOrderError, match=r"step\(\) was called before backward\(loss\): there are no gradients"):
            amp.step()
        with amp.autocast():
            loss = loss_of(amp.model, *make_batches(1)[0])
        with pytest.raises(StepOrderError, match=r"step\(\) was called before backward"):
            amp.step()
        for _ in range(accumulate):
            amp.backward(loss * 1.0 if accumulate == 1 else loss_of(amp.model, *make_batches(1)[0]))
        assert amp.step() is not None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_backward_too_many_is_refused_and_changes_nothing(accumulate: int) -> None:
    amp, expected = make(accumulate=accumulate), make(accumulate=accumulate)
    batches = make_batches(accumulate + 1)
    for engine in (amp, expected):
        for x, y in batches[:accumulate]:
            engine.backward(loss_of(engine.model, x, y))
    with pytest.raises(
        StepOrderError,
        match=rf"backward\(\) was called {accumulate + 1} times without step\(\), but accumulate={accumulate}\. Call step\(\)",
    ):
        amp.backward(loss_of(amp.model, *batches[-1]))
    records = amp.step(), expected.step()
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].loss == records[1].loss
    assert same_state(amp.model.state_dict(), expected.model.state_dict())


@pytest.mark.parametrize("pending", [1, 2])
def test_train_step_in_the_middle_of_manual_micro_batches_is_refused_and_changes_nothing(pending: int) -> None:
    amp, expected = make(accumulate=3), make(accumulate=3)
    batches = make_batches(3)
    for engine in (amp, expected):
        for number, (x, y) in enumerate(batches):
            if engine is amp and number == pending:
                with pytest.raises(StepOrderError, match=rf"after {pending} of accumulate=3 micro-batches, whose gradients would"):
                    amp.train_step(lambda x, y: loss_of(amp.model, x, y), x, y)
            engine.backward(loss_of(engine.model, x, y))
            record = engine.step()
        assert record is not None
    assert same_state(amp.model.state_dict(), expected.model.state_dict())


def _no_grad(amp: MixedPrecision) -> Tensor:
    with torch.no_grad():
        return loss_of(amp.model, *make_batches(1)[0])


BAD_LOSSES: list[tuple[Callable[[MixedPrecision], Any], type[HalfstepError], str]] = [
    (lambda amp: amp.model(torch.ones(4, 5)), ConfigurationError, r"scalar tensor, not one of shape (4, 3). Reduce it"),
    (lambda amp: amp.model(torch.ones(1, 5)).sum().reshape(1), ConfigurationError, r"not one of shape (1,). Reduce it"),
    (lambda amp: amp.model(torch.ones(1, 5)).sum().item(), InvalidTypeError, "The loss must be a scalar tensor, not a float."),
    (lambda _: None, InvalidTypeError, "The loss must be a scalar tensor, not a NoneType."),
    (lambda amp: {"loss": amp.model(torch.ones(1, 5)).sum()}, InvalidTypeError, "The loss must be a scalar tensor, not a dict."),
    (lambda amp: (amp.model(torch.ones(1, 5)).sum(), 1), InvalidTypeError, "The loss must be a scalar tensor, not a tuple."),
    (lambda amp: amp.model(torch.ones(1, 5)).sum().detach(), ConfigurationError, "The loss needs no gradient"),
    (_no_grad, ConfigurationError, "it was computed under no_grad, detached, rebuilt from a Python number"),
    (lambda _: torch.tensor(1.0), ConfigurationError, "The loss needs no gradient"),
    (lambda _: torch.tensor(1), ConfigurationError, "The loss needs no gradient"),
]


@pytest.mark.parametrize(("make_loss", "error", "message"), BAD_LOSSES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wrong_loss_is_refused_and_the_next_step_is_as_if_it_had_not_been(
    precision: str, make_loss: Callable[[MixedPrecision], Any], error: type[HalfstepError], message: str
) -> None:
    amp, fresh = make(precision), make(precision)
    with pytest.raises(error, match=re.escape(message)):
        amp.train_step(lambda: make_loss(amp))
    with pytest.raises(error, match=re.escape(message)):
        amp.backward(make_loss(amp))
    with pytest.raises(StepOrderError):
        amp.step()
    x, y = make_batches(1)[0]
    records = [engine.train_step(lambda x, y, engine=engine: loss_of(engine.model, x, y), x, y) for engine in (amp, fresh)]
    assert records[0].step == records[1].step == 1
    assert records[0].loss == records[1].loss
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())


@pytest.mark.parametrize("fn", [torch.ones(2), None, 1])
def test_train_step_wants_a_function_first(fn: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"train_step\(fn, \*batch\) takes the function that computes the loss first, not a (Tensor|NoneType|int)"
    ):
        make().train_step(fn, torch.ones(2))


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interruption, torch.OutOfMemoryError])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_exception_in_the_function_leaves_nothing_behind(precision: str, accumulate: int, error: type[BaseException]) -> None:
    amp, fresh = make(precision, accumulate=accumulate), make(precision, accumulate=accumulate)
    (x, y), *_ = make_batches(1)
    calls = iter(range(100))

    def fails(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(amp.model, x, y)
        if next(calls) == accumulate - 1:
            raise error("in fn")
        return loss

    before = amp.model.state_dict()
    with pytest.raises(error, match="in fn"):
        amp.train_step(fails, x, y)
    assert next(calls) == accumulate
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    assert same_state(amp.model.state_dict(), before)
    records = [engine.train_step(lambda x, y, engine=engine: loss_of(engine.model, x, y), x, y) for engine in (amp, fresh)]
    assert records[0].step == records[1].step == 1
    assert (records[0].loss, records[0].scale, records[0].skipped) == (records[1].loss, records[1].scale, records[1].skipped)
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())
    assert same_state(amp.optimizer.state_dict(), fresh.optimizer.state_dict())


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_exception_in_the_backward_pass_leaves_nothing_behind(precision: str, accumulate: int, manual: bool) -> None:
    amp, fresh = make(precision, accumulate=accumulate), make(precision, accumulate=accumulate)
    x, y = make_batches(1)[0]
    first = amp.model[0].bias  # type: ignore[index]

    def interrupt(_: Tensor) -> None:
        raise ValueError("in backward")

    handle = first.register_hook(interrupt)
    with pytest.raises(ValueError, match="in backward"):
        take_step(amp, x, y, manual=manual)
    handle.remove()
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    for engine in (amp, fresh):
        record = engine.train_step(lambda x, y, engine=engine: loss_of(engine.model, x, y), x, y)
        assert record.step == 1
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_exception_in_the_optimizer_leaves_nothing_behind(precision: str, fused: bool, clip: float | None, manual: bool) -> None:
    """Out of memory in the first `step()`, where Adam allocates its state, is the common one; the scaler must forget the step too."""
    amp, fresh = (make(precision, fused=fused, max_grad_norm=clip) for _ in range(2))
    x, y = make_batches(1)[0]

    def interrupt(*_: Any) -> None:
        raise torch.OutOfMemoryError("in the optimizer")

    handle = amp.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(torch.OutOfMemoryError, match="in the optimizer"):
        take_step(amp, x, y, manual=manual)
    handle.remove()
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    for _ in range(2):
        records = [engine.train_step(lambda x, y, engine=engine: loss_of(engine.model, x, y), x, y) for engine in (amp, fresh)]
        assert (records[0].step, records[0].loss, records[0].scale) == (records[1].step, records[1].loss, records[1].scale)
    assert same_state(amp.model.state_dict(), fresh.model.state_dict())
    if amp.scaler is not None:
        assert fresh.scaler is not None
        assert amp.scaler.state_dict() == fresh.scaler.state_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_autocast_returns_a_new_object_that_nests_and_ends(precision: str) -> None:
    amp = make(precision)
    enabled = precision != "fp32"
    outer, inner = amp.autocast(), amp.autocast()
    assert outer is not inner
    assert isinstance(outer, torch.autocast)
    with outer:
        assert torch.is_autocast_enabled("cpu") == enabled
        with inner:
            assert torch.is_autocast_enabled("cpu") == enabled
        assert torch.is_autocast_enabled("cpu") == enabled
        if enabled:
            assert torch.get_autocast_dtype("cpu") == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="inside"), amp.autocast():
        raise ValueError("inside")
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_is_fp32_inside_a_region_of_another_precision() -> None:
    amp = make("fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with amp.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loss_from_outside_an_autocast_region_is_accepted(precision: str) -> None:
    amp = make(precision)
    amp.backward(nn.functional.mse_loss(amp.model(torch.ones(2, 5)), torch.ones(2, 3)))
    record = amp.step()
    assert record is not None
    assert record.step_time_s > 0
