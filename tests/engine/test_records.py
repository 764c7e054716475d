from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine import MixedPrecision
from halfstep.engine.gradient_step import GradientStep, Outcome
from halfstep.engine.gradients import Gradients
from halfstep.engine.recording import Recorder, current_lr
from halfstep.records import StepRecord
from halfstep.scaler import LossScaler
from tests.engine.loops import loss_of, make_batches, make_net

INF = math.inf
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


def make_fused(precision: str = "fp16", **settings: Any) -> MixedPrecision:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), precision, **settings)


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for a device: each read of a number that lies in a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": 1.0},
        {"max_grad_value": 0.5, "accumulate": 2},
        {"max_grad_norm": 1.0, "accumulate": 4, "scaler": LossScaler(hysteresis=2, min_scale=0.0)},
    ],
    ids=["plain", "clip", "clip value, accumulate", "hysteresis, no floor"],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_a_fused_optimizer_no_step_waits_for_the_device(precision: str, settings: dict[str, Any]) -> None:
    if precision != "fp16":
        settings = {name: value for name, value in settings.items() if name != "scaler"}
    amp = make_fused(precision, **settings)
    (first,), batches = make_batches(1), make_batches(12)
    amp.train_step(lambda x, y: loss_of(amp.model, x, y), *first)  # Its optimizer makes its state in it, once.
    kept = []
    with Reads() as reads:
        for number, (x, y) in enumerate(batches):
            factor = INF if number % 5 == 2 else 1.0
            kept.append(amp.train_step(lambda x, y, factor=factor: loss_of(amp.model, x, y) * factor, x, y))
    assert reads.count == 0
    assert [record.skipped for record in kept] == [number % 5 == 2 for number in range(12)]
    assert amp.stats().steps == 13
    assert amp.stats().skips == 2


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, LossScaler])
def test_torchs_own_scaler_waits_no_more_often(scaler: Any) -> None:
    amp = make_fused(scaler=scaler("cpu"), max_grad_norm=1.0)
    amp.train_step(lambda x, y: loss_of(amp.model, x, y), *make_batches(1)[0])
    with Reads() as reads:
        for x, y in make_batches(3):
            amp.train_step(lambda x, y: loss_of(amp.model, x, y), x, y)
    assert reads.count == 0


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, LossScaler])
def test_on_an_accelerator_an_unfused_optimizer_waits_once_as_in_torchs_own_loop(scaler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thinks that its device is CUDA; all tensors stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    model, made, device = make_net(), scaler("cpu"), torch.device("cuda")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    settings: Any = {"ranks": None, "max_grad_norm": 1.0, "max_grad_value": None, "on_host": True, "device": device, "setup": {}}
    end = GradientStep(model=model, optimizers=optimizers, gradients=Gradients(optimizers), scaler=made, **settings)
    loss = loss_of(model, *make_batches(1)[0])
    made.scale(loss).backward()
    with Reads() as reads:
        outcome = end.take()
        record = Recorder(precision="fp16", device=device).record(
            outcome, step=1, loss=loss.detach(), lr=current_lr(optimizers[0]), started=0.0
        )
        assert not record.skipped
    assert reads.count == 1
    assert (record.scale, record.loss, record.lr) == (2.0**16, loss.item(), 0.1)
    assert record.grad_norm is not None
    assert record.grad_norm > 0


def test_records_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    amp = make_fused(max_grad_norm=1.0)
    records = [amp.train_step(lambda x, y: loss_of(amp.model, x, y), x, y) for x, y in make_batches(6)]
    transfers: list[int] = []
    tolist = Tensor.tolist

    def watched(tensor: Tensor) -> Any:
        transfers.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", watched)
    assert records[3].loss > 0
    assert len(transfers) == 1
    for record in records:
        assert (record.skipped, record.scale) == (False, 2.0**16)
        assert record.grad_norm is not None
        assert record.lr == 0.1
    assert len(transfers) == 1, "each record was read by itself"


def test_what_is_read_late_is_what_was_true_then() -> None:
    """The scale, the learning rate and the loss of a step, read after later steps have changed them."""
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    optimizer = torch.optim.AdamW(weight.parameters(), lr=torch.tensor(0.5), fused=True)
    amp = MixedPrecision(weight, optimizer, "fp16", scaler=LossScaler(init_scale=64.0, growth_interval=1))
    records = []
    for number, factor in enumerate([1.0, 1.0, INF, 1.0]):
        optimizer.param_groups[0]["lr"].fill_(number + 1)
        records.append(amp.train_step(lambda factor=factor: (weight.weight * factor).sum()))
    assert [record.scale for record in records] == [64.0, 128.0, 256.0, 128.0]
    assert [record.skipped for record in records] == [False, False, True, False]
    assert [record.lr for record in records] == [1.0, 2.0, 3.0, 4.0]
    assert math.isinf(records[2].loss)
    assert records[0].loss == 1.0


def test_on_an_accelerator_the_memory_is_told_and_the_loss_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thinks that its device is CUDA; all tensors stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12345)
    recorder = Recorder(precision="fp16", device=torch.device("cuda"))
    loss = torch.tensor(0.25)
    outcome = Outcome(skipped=None, found_inf=torch.ones(()), norm=None, scale=1.0)
    record = recorder.record(outcome, step=1, loss=loss, lr=0.1, started=0.0)
    loss.fill_(99.0)  # as the next replay of a CUDA graph would
    assert (record.loss, record.memory_bytes, record.skipped, record.grad_norm) == (0.25, 12345, True, None)


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
