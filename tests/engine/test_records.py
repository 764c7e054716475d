from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from halfstep.engine import MixedPrecision
from halfstep.records import StepRecord
from tests.engine.loops import loss_of, make_batches, make_net

PRECISIONS = ["fp32", "bf16", "fp16"]


def make(precision: str, *, clip: float | None = 1.0, accumulate: int = 1) -> MixedPrecision:
    model = make_net()
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, max_grad_norm=clip, accumulate=accumulate)


def step(amp: MixedPrecision) -> StepRecord:
    return amp.train_step(lambda x, y: loss_of(amp.model, x, y), *make_batches(1)[0])


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_record_goes_through_json_and_comes_back(precision: str, clip: float | None) -> None:
    record = step(make(precision, clip=clip))
    assert StepRecord.from_json(record.to_json()) == record
    assert record.precision == precision
    assert (record.grad_norm is None) == (clip is None)
    assert record.memory_bytes is None
    assert [type(getattr(record, name)) for name in ("step", "skipped", "scale", "loss", "lr")] == [int, bool, float, float, float]


def test_steps_are_counted_from_one() -> None:
    amp = make("fp16")
    assert [step(amp).step for _ in range(3)] == [1, 2, 3]


def test_on_a_cpu_the_values_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> StepRecord:
        raise AssertionError("a record was deferred")

    monkeypatch.setattr(StepRecord, "deferred", refuse)
    assert step(make("bf16")).loss > 0


@pytest.mark.parametrize("skips", [False, True])
def test_on_an_accelerator_the_values_are_read_when_they_are_asked_for(skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thinks that its device is CUDA; all tensors stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12345)
    amp = make("fp16")
    loss = loss_of(amp.model, *make_batches(1)[0]) * (float("inf") if skips else 1.0)
    value = loss.item()
    amp.device = torch.device("cuda")
    amp.backward(loss)
    reads: list[Tensor] = []
    item = Tensor.item

    def watched(tensor: Tensor) -> bool | float | int:
        reads.append(tensor)
        return item(tensor)

    monkeypatch.setattr(Tensor, "item", watched)
    record = amp.step()
    assert record is not None
    assert len(reads) == 2, "the scale and the scaler's verdict, which wait for the same work"
    assert (record.memory_bytes, record.skipped, record.scale) == (12345, skips, 2.0**16)
    assert len(reads) == 2
    loss.detach().fill_(99.0)  # as the next replay of a CUDA graph would
    assert record.loss == value
    assert record.lr == 0.1
    assert record.grad_norm is not None
    assert len(reads) == 4
    assert record.loss == value
    assert len(reads) == 4


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_time_of_a_step_is_that_from_its_first_forward(accumulate: int) -> None:
    amp = make("bf16", accumulate=accumulate)
    pause = 0.01

    def slow(x: Tensor, y: Tensor) -> Tensor:
        time.sleep(pause)
        return loss_of(amp.model, x, y)

    start = time.perf_counter()
    record = amp.train_step(slow, *make_batches(1)[0])
    assert pause * accumulate < record.step_time_s < time.perf_counter() - start

    time.sleep(0.3)
    start = time.perf_counter()
    for _ in range(accumulate):
        with amp.autocast():
            loss = slow(*make_batches(1)[0])
        amp.backward(loss)
        manual = amp.step()
    assert manual is not None
    assert pause * accumulate < manual.step_time_s < time.perf_counter() - start


def test_an_evaluation_between_steps_does_not_count() -> None:
    amp = make("bf16")
    step(amp)
    x, y = make_batches(1)[0]
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), amp.autocast():
            loss_of(amp.model, x, y)
    time.sleep(0.3)
    start = time.perf_counter()
    with amp.autocast():
        loss = loss_of(amp.model, x, y)
    amp.backward(loss)
    record = amp.step()
    assert record is not None
    assert 0 < record.step_time_s < time.perf_counter() - start


def test_an_abandoned_forward_pass_does_not_count_for_train_step() -> None:
    amp = make("fp32")
    amp.autocast()
    time.sleep(0.2)
    start = time.perf_counter()
    assert step(amp).step_time_s < time.perf_counter() - start
