"""Groups of micro-batches that the end of a loader cuts short, and what moves with a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfstep.engine import MixedPrecision
from halfstep.errors import InvalidTypeError, StepOrderError
from halfstep.records import Precision, StepRecord
from halfstep.scaler import LossScaler
from tests.engine.loops import Batch, loss_of, make_batches, make_net, same_state

INF = float("inf")
PRECISIONS: list[Precision] = ["fp32", "bf16", "fp16"]


def engine(precision: str = "fp32", *, accumulate: int = 1, fused: bool = False, **settings: Any) -> MixedPrecision:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = LossScaler(init_scale=2.0**8) if precision == "fp16" else None
    return MixedPrecision(model, optimizer, precision, accumulate=accumulate, scaler=scaler, **settings)


def micro_batch(amp: MixedPrecision, x: Tensor, y: Tensor, factor: float = 1.0) -> StepRecord | None:
    with amp.autocast():
        loss = loss_of(amp.model, x, y, factor)
    amp.backward(loss)
    return amp.step()


def by_loader(amp: MixedPrecision, batches: Iterable[Batch]) -> list[StepRecord]:
    records = [micro_batch(amp, *batch) for batch in amp.micro_batches(batches)]
    assert amp.flush() is None
    return [record for record in records if record is not None]


def by_flush(amp: MixedPrecision, batches: Iterable[Batch]) -> list[StepRecord]:
    records = [micro_batch(amp, *batch) for batch in batches]
    return [record for record in (*records, amp.flush()) if record is not None]


def by_unscaling(amp: MixedPrecision, batches: Iterable[Batch]) -> list[StepRecord]:
    """As `by_loader`, with the gradients unscaled ahead of the step, which is refused until a group has its last micro-batch."""
    records = []
    for x, y in amp.micro_batches(batches):
        with amp.autocast():
            loss = loss_of(amp.model, x, y)
        amp.backward(loss)
        with contextlib.suppress(StepOrderError):
            amp.unscale_gradients()
        records.append(amp.step())
    return [record for record in records if record is not None]


def by_hand(batches: list[Batch], *, precision: Precision, accumulate: int, clip: float | None) -> tuple[nn.Module, list[float]]:
    """Each group's gradients are the mean over the micro-batches that it has."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    losses = []
    for start in range(0, len(batches), accumulate):
        group = batches[start : start + accumulate]
        total = 0.0
        for x, y in group:
            with torch.autocast("cpu", dtype=dtype, enabled=precision != "fp32"):
                loss = loss_of(model, x, y) / len(group)
            total += loss.item()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    return model, losses


@pytest.mark.parametrize("drive", [by_loader, by_flush, by_unscaling])
@pytest.mark.parametrize(("accumulate", "rest"), [(n, k) for n in range(1, 5) for k in range(n)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_group_that_is_cut_short_is_the_mean_over_what_it_has(
    precision: Precision, accumulate: int, rest: int, drive: Callable[..., list[StepRecord]]
) -> None:
    batches = make_batches(2 * accumulate + rest)
    clip = 0.3 if rest != 1 else None
    model, losses = by_hand(batches, precision=precision, accumulate=accumulate, clip=clip)
    amp = engine(precision, accumulate=accumulate, max_grad_norm=clip)
    records = drive(amp, batches)
    assert [record.step for record in records] == list(range(1, len(losses) + 1))
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-6)
    exact = accumulate in (1, 2, 4) and (rest or accumulate) in (1, 2, 4)
    if exact and precision != "fp16":  # In fp16 a smaller loss may round otherwise in the backward pass, by what is below its range.
        assert same_state(amp.model.state_dict(), model.state_dict())
    tolerance = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}[precision]
    for mine, hand in zip(amp.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, hand, rtol=tolerance, atol=tolerance)


def test_the_loader_is_passed_on_as_it_is() -> None:
    amp = engine(accumulate=2)
    for loader in ([1, 2, 3], (number for number in [1, 2, 3]), range(1, 4), {1: "a", 2: "b", 3: "c"}):
        assert list(amp.micro_batches(loader)) == [1, 2, 3]
    assert list(amp.micro_batches(iter([]))) == []
    assert amp.flush() is None
    assert isinstance(amp.micro_batches([1]), Iterator)


def test_it_holds_one_batch_more_than_is_needed_and_no_others() -> None:
    amp, drawn = engine(), []

    def loader() -> Iterator[int]:
        for number in range(5):
            drawn.append(number)
            yield number

    for number in amp.micro_batches(loader()):
        assert drawn == list(range(min(number + 2, 5)))


@pytest.mark.parametrize("consume", [by_loader, by_flush])
def test_a_second_epoch_begins_afresh(consume: Callable[..., list[StepRecord]]) -> None:
    batches = make_batches(5)
    amp = engine(accumulate=2)
    assert [record.step for epoch in range(3) for record in consume(amp, batches)] == list(range(1, 10))


def test_a_loop_that_is_left_early_ends_its_group_by_flush() -> None:
    batches = make_batches(4)
    amp, other = engine(accumulate=4), engine(accumulate=4)
    for number, batch in enumerate(amp.micro_batches(batches)):
        assert micro_batch(amp, *batch) is None
        if number == 1:
            break
    record = amp.flush()
    assert record is not None
    assert record.loss == pytest.approx(by_flush(other, batches[:2])[0].loss)
    assert same_state(amp.model.state_dict(), other.model.state_dict())
    assert amp.flush() is None


@pytest.mark.parametrize("last", [True, False])
def test_after_a_loop_that_is_left_early_groups_have_their_size_again(last: bool) -> None:
    amp = engine(accumulate=2)
    batches = make_batches(3)
    for number, _ in enumerate(amp.micro_batches(batches)):
        if number == 2 or not last:
            break  # In the last batch the engine knows that no other follows, which must not outlive the loop.
    assert micro_batch(amp, *batches[0]) is None
    assert micro_batch(amp, *batches[1]) is not None


def test_an_exception_in_the_last_batch_of_a_loop_does_not_shorten_the_next_group() -> None:
    amp = engine(accumulate=2)
    batches = make_batches(3)

    def epoch() -> None:
        for number, _ in enumerate(amp.micro_batches(batches)):
            if number == 2:
                raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        epoch()
    assert micro_batch(amp, *batches[0]) is None
    assert micro_batch(amp, *batches[1]) is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_nothing_pending_there_is_nothing_to_flush(precision: str) -> None:
    amp = engine(precision, accumulate=2)
    assert amp.flush() is None
    with amp.autocast():
        loss_of(amp.model, *make_batches(1)[0])
    assert amp.flush() is None
    assert amp.stats().steps == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_flushed_step_that_overflows_is_skipped(precision: str, fused: bool) -> None:
    amp = engine(precision, accumulate=3, fused=fused)
    before = {name: value.clone() for name, value in amp.model.state_dict().items()}
    for (x, y), factor in zip(make_batches(2), (1.0, INF), strict=True):
        micro_batch(amp, x, y, factor)
    record = amp.flush()
    assert record is not None
    assert record.skipped
    assert same_state(amp.model.state_dict(), before)
    assert by_flush(amp, make_batches(1))[0].skipped is False


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_callbacks_and_schedules_move_with_each_step_that_is_taken(precision: str, fused: bool) -> None:
    seen: list[tuple[str, Any]] = []

    class Called:
        def __call__(self, record: StepRecord, /) -> None:
            seen.append(("object", record))

        def method(self) -> None:
            seen.append(("method", None))

    def keyword(*, record: Any = None, **_: Any) -> None:
        seen.append(("keyword", record))

    callbacks = [
        lambda record: seen.append(("record", record)),
        lambda: seen.append(("none", None)),
        lambda step=0: seen.append(("default", step)),
        lambda *args: seen.append(("any", args)),
        functools.partial(lambda name, record: seen.append((name, record)), "partial"),
        Called(),
        Called().method,
        keyword,
    ]
    amp = engine(precision, fused=fused, on_step=callbacks)
    rates: list[float] = []
    for factor in (1.0, INF, 1.0):
        record = micro_batch(amp, *make_batches(1)[0], factor)
        assert record is not None
        expected = [
            ("record", record), ("none", None), ("default", 0), ("any", ()), ("partial", record), ("object", record), ("method", None),
            ("keyword", None),
        ]  # fmt: skip
        assert seen == ([] if factor == INF else expected)
        assert record.skipped == (factor == INF)
        rates.append(record.lr)
        seen.clear()


def test_a_built_in_function_gets_the_record() -> None:
    records: list[StepRecord] = []
    amp = engine(on_step=records.append)
    assert micro_batch(amp, *make_batches(1)[0]) is records[0]


@pytest.mark.parametrize("on_step", [1, "ema", [None]])
def test_what_cannot_be_called_after_a_step_is_refused(on_step: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"\(on_step=\.\.\.\) takes functions to call after a step, not a (int|str|NoneType)"):
        engine(on_step=on_step)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_average_of_the_weights_sees_taken_steps_alone(precision: str, fused: bool) -> None:
    model, hand = make_net(), make_net()
    average, expected = AveragedModel(model), AveragedModel(hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    amp = MixedPrecision(model, optimizer, precision, on_step=lambda: average.update_parameters(model))
    plain = MixedPrecision(hand, torch.optim.SGD(hand.parameters(), lr=0.1, fused=fused), precision)
    for (x, y), factor in zip(make_batches(5), (INF, 1.0, 1.0, INF, 1.0), strict=True):
        record = amp.train_step(lambda x, y, factor=factor: loss_of(model, x, y, factor) * 1e-2, x, y)
        if not plain.train_step(lambda x, y, factor=factor: loss_of(hand, x, y, factor) * 1e-2, x, y).skipped:
            expected.update_parameters(hand)
        assert record.skipped == (factor == INF)
    assert int(average.n_averaged) == 3
    assert same_state(average.state_dict(), expected.state_dict())
