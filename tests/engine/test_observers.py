"""What an engine tells those who follow a process: which optimizers it drives, and each of its steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision, Recorder, is_driven, step_observers, times_driven
from halfstep.engine.guard import StepGuard
from halfstep.records import StepRecord
from tests.engine.loops import OPTIMIZERS, loss_of, make_batches, make_net


def engine(precision: str = "fp16", *, optimizer: str = "sgd", **settings: Any) -> MixedPrecision:
    model = make_net()
    return MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), precision, **settings)


def train(amp: MixedPrecision, *, steps: int = 1) -> list[StepRecord]:
    return [amp.train_step(lambda x, y: loss_of(amp.model, x, y), x, y) for x, y in make_batches(steps)]


Told = list[tuple[Recorder, StepRecord]]


@pytest.fixture
def told() -> Iterator[Told]:
    """What is told of steps."""
    seen: Told = []

    def see(recorder: Recorder, record: StepRecord) -> None:
        seen.append((recorder, record))

    step_observers.append(see)
    yield seen
    step_observers.remove(see)


class TestDriven:
    def test_optimizers_are_driven_once_an_engine_has_them(self) -> None:
        before, model = times_driven(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
        assert not any(map(is_driven, optimizers))
        amp = MixedPrecision(model, optimizers, "fp32")
        assert all(map(is_driven, optimizers))
        assert times_driven() == before + 2
        del amp

    def test_one_stays_driven_when_its_engine_is_left(self) -> None:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = times_driven()
        for times in (1, 2):
            amp = MixedPrecision(model, optimizer, "fp32")
            del amp
            gc.collect()
            assert is_driven(optimizer)
            assert times_driven() == before + times

    def test_one_that_ends_does_not_make_up_for_one_that_begins(self) -> None:
        before = times_driven()
        for times in (1, 2):
            amp = engine()
            assert times_driven() == before + times
            del amp
            gc.collect()
            assert times_driven() == before + times

    def test_another_of_the_same_model_is_not_driven(self) -> None:
        amp = engine()
        assert not is_driven(torch.optim.SGD(amp.model.parameters(), lr=0.1))

    def test_one_that_takes_no_hooks_is_not_driven(self) -> None:
        class Bare(torch.optim.Optimizer):
            def __init__(self) -> None: ...

        bare = Bare()
        StepGuard([bare], owner=self)
        assert not is_driven(bare)


class TestObservers:
    def test_there_are_none_by_themselves(self) -> None:
        assert step_observers == []

    @pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_each_step_is_told_once_with_its_record(self, precision: str, optimizer: str, told: Told) -> None:
        amp = engine(precision, optimizer=optimizer)
        records = train(amp, steps=3)
        assert [id(record) for _, record in told] == [id(record) for record in records]
        assert [record.step for _, record in told] == [1, 2, 3]
        assert len({id(recorder) for recorder, _ in told}) == 1

    def test_a_skipped_step_is_one(self, told: Told) -> None:
        amp = engine()
        (x, y), *_ = make_batches(1)
        amp.train_step(lambda x, y: loss_of(amp.model, x, y) * float("inf"), x, y)
        assert [record.skipped for _, record in told] == [True]

    def test_micro_batches_are_none(self, told: Told) -> None:
        amp = engine(accumulate=3)
        for x, y in make_batches(7):
            with amp.autocast():
                loss = loss_of(amp.model, x, y)
            amp.backward(loss)
            amp.step()
        assert [record.step for _, record in told] == [1, 2]

    def test_engines_are_told_apart(self, told: Told) -> None:
        first, second = engine(), engine("bf16")
        for amp in (first, second, first):
            train(amp)
        recorders = [recorder for recorder, _ in told]
        assert recorders[0] is recorders[2] is not recorders[1]
        assert [(record.step, record.precision) for _, record in told] == [(1, "fp16"), (1, "bf16"), (2, "fp16")]

    def test_numbers_that_lie_on_a_device_are_not_read(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        amp = engine(optimizer="adamw-fused", max_grad_norm=1.0)
        train(amp)
        read: list[str] = []
        for name in ("item", "tolist"):
            original = getattr(Tensor, name)

            def seen(tensor: Tensor, name: str = name, original: Any = original) -> Any:
                read.append(name)
                return original(tensor)

            monkeypatch.setattr(Tensor, name, seen)
        train(amp, steps=2)
        assert read == []
        assert [record.loss > 0 for _, record in told] == [True] * 3

    def test_all_are_told_in_turn(self, told: Told) -> None:
        order: list[str] = []

        def first(recorder: Recorder, record: StepRecord) -> None:
            order.append("first")

        def second(recorder: Recorder, record: StepRecord) -> None:
            order.append("second")

        step_observers.extend([first, second])
        try:
            train(engine())
        finally:
            step_observers.remove(first)
            step_observers.remove(second)
        assert order == ["first", "second"]
        train(engine())
        assert len(order) == 2
        assert len(told) == 2

    def test_what_one_raises_leaves_the_step(self) -> None:
        def refuse(recorder: Recorder, record: StepRecord) -> None:
            raise ValueError("full")

        amp = engine()
        step_observers.append(refuse)
        try:
            with pytest.raises(ValueError, match="full"):
                train(amp)
        finally:
            step_observers.remove(refuse)
        assert train(amp)[0].step == 2
