"""Which step `halfstep.diagnose` finds, how it ends, and which models it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.records import Diagnosis
from tests.diagnosis.tasks import BREAKING, Net, diagnose, factored, factory, loss_of
from tests.engine.loops import same_state

INF = float("inf")
pytestmark = pytest.mark.usefixtures("one_thread")


class Linear(nn.Linear):
    """One that takes a factor."""

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        result: Tensor = super().forward(x) * factor
        return result


def fast(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e3)


class TestWhichStep:
    @pytest.mark.parametrize("step", [1, 2, 4, 6])
    def test_the_one_that_fails(self, step: int) -> None:
        factors = [1.0] * 6
        factors[step - 1] = BREAKING
        diagnosis = diagnose(factory(factored(*factors)), max_steps=6, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step, diagnosis.steps, diagnosis.skips) == ("forward", step, step, 1)
        assert diagnosis.verified
        assert diagnosis.is_reproduced

    def test_none_fails_and_the_last_one_is_looked_into(self) -> None:
        diagnosis = diagnose(factory(factored(1.0, 1.0)), max_steps=5, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step, diagnosis.steps, diagnosis.skips, diagnosis.is_finding) == ("healthy", 5, 5, 0, False)

    @pytest.mark.parametrize("factor", [1.0, BREAKING])
    def test_a_single_step(self, factor: float) -> None:
        diagnosis = diagnose(factory(factored(factor)), max_steps=1, loss_scale=64.0)
        assert (diagnosis.cause == "healthy") == (factor == 1.0)
        assert (diagnosis.step, diagnosis.steps, diagnosis.skips) == (1, 1, int(factor != 1.0))

    @pytest.mark.parametrize("scale", [2.0**30, 2.0**60])
    def test_a_scale_that_is_lowered_and_then_another_failure(self, scale: float) -> None:
        diagnosis = diagnose(factory(factored(1.0, 1.0, 1.0, BREAKING, 1.0)), max_steps=5, loss_scale=scale)
        assert (diagnosis.cause, diagnosis.step, diagnosis.steps, diagnosis.skips) == ("forward", 4, 4, 2)
        assert diagnosis.scale < 2.0**24

    def test_a_scale_that_is_lowered_and_nothing_else(self) -> None:
        diagnosis = diagnose(factory(factored(1.0, 1.0)), max_steps=6, loss_scale=2.0**40)
        assert (diagnosis.cause, diagnosis.step, diagnosis.steps, diagnosis.skips) == ("scale", 1, 6, 1)
        assert (diagnosis.scale, diagnosis.verified) == (2.0**40, True)
        assert diagnosis.passing_scale is not None
        again = diagnose(factory(factored(1.0, 1.0)), max_steps=6, loss_scale=diagnosis.passing_scale)
        assert again.cause == "healthy"

    def test_a_scale_that_a_later_step_is_the_first_to_break(self) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            scaled: Tensor = loss_of(model, (batch[0], 1.0)) * batch[1]
            return scaled

        diagnosis = diagnose(factory(factored(1.0, 1.0, 1e4, 1.0), loss=loss), max_steps=6, loss_scale=2.0**12)
        assert (diagnosis.cause, diagnosis.step, diagnosis.steps, diagnosis.skips) == ("scale", 3, 6, 1)
        assert diagnosis.passing_scale is not None
        assert diagnosis.passing_scale < 2.0**12

    def test_bad_data_at_a_later_step(self) -> None:
        batches = factored(1.0, 1.0, 1.0, 1.0)
        batches[2][0][1, 2] = INF
        before = deepcopy(batches)
        diagnosis = diagnose(factory(batches), max_steps=9, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step, diagnosis.verified) == ("data", 3, True)
        assert [(each.name, each.nonfinite, each.elements) for each in diagnosis.tensors] == [("batch[0]", 1, 24)]
        assert same_state(batches, before)

    def test_parameters_that_an_update_made_infinite(self) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            scaled: Tensor = model(batch[0]).mean() * batch[1]
            return scaled

        task = factory(factored(1e-9, 1e38, 1.0), loss=loss, model=lambda: Linear(4, 2), optimizer=fast)
        diagnosis = diagnose(task, max_steps=9, precision="fp32")
        assert diagnosis.cause == "parameters"
        assert {each.since for each in diagnosis.tensors} == {diagnosis.step - 1}

    def test_an_infinite_loss_whose_gradients_are_finite(self) -> None:
        """The step is taken, so it cannot be replayed: the one after it is looked into."""

        def loss(model: Any, batch: Any) -> Tensor:
            scaled: Tensor = model(batch[0]).mean() * batch[1] + (batch[0].abs().sum() * batch[1] * 1e3).detach()
            return scaled

        task = factory(factored(1e-9, 1e37, 1e-9), loss=loss, model=lambda: Linear(4, 2), optimizer=fast)
        diagnosis = diagnose(task, max_steps=9, precision="fp32")
        assert (diagnosis.step, diagnosis.cause) == (3, "parameters")
        assert {each.since for each in diagnosis.tensors} == {2}

    @pytest.mark.parametrize("kind", ["expanded", "inference"])
    def test_bad_data_that_cannot_be_written_to(self, kind: str) -> None:
        if kind == "expanded":
            x = torch.tensor([INF, 1.0, 1.0, 1.0]).expand(6, 4)
        else:
            with torch.inference_mode():
                x = torch.tensor([INF, 1.0, 1.0, 1.0]).repeat(6, 1)
        assert diagnose(factory([(x, torch.tensor(1.0))])).cause == "data"

    def test_what_does_not_happen_again(self) -> None:
        """A loss that draws its batch by itself, and has drawn another one by the time of the replay."""
        factors = iter([1.0] * 4 + [BREAKING] + [1.0] * 40)
        diagnosis = diagnose(
            factory(factored(1.0), loss=lambda model, batch: loss_of(model, (batch[0], next(factors)))), max_steps=9, loss_scale=64.0
        )
        assert (diagnosis.cause, diagnosis.is_reproduced, diagnosis.is_finding) == ("healthy", False, True)
        assert (diagnosis.step, diagnosis.steps, diagnosis.skips) == (3, 3, 1)
        assert diagnosis.evidence
        assert diagnosis.explanation

    def test_a_loss_that_never_computes_the_same(self) -> None:
        draws = iter(factored(*[1.0] * 40))
        diagnosis = diagnose(factory([0], loss=lambda model, batch: loss_of(model, next(draws))), loss_scale=64.0)
        assert diagnosis.cause == "healthy"

    def test_a_function_that_never_computes_the_same(self) -> None:
        model, draws = Net(), iter(factored(BREAKING, *[1.0] * 40))
        diagnosis = diagnose(lambda: loss_of(model, next(draws)), model=model, target="cuda", loss_scale=64.0)
        assert not diagnosis.is_reproduced

    def test_an_iterator_that_starts_once(self) -> None:
        diagnosis = diagnose(factory(lambda: iter(factored(1.0, BREAKING, 1.0, 1.0, 1.0))), max_steps=5, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step) == ("forward", 2)

    def test_an_iterator_with_as_many_batches_as_steps(self) -> None:
        assert diagnose(factory(lambda: iter(factored(1.0, 1.0, 1.0))), max_steps=3, loss_scale=64.0).cause == "healthy"

    def test_a_data_loader(self) -> None:
        def batches() -> Any:
            factors = torch.tensor([1.0, 1.0, BREAKING, 1.0])
            return DataLoader(TensorDataset(torch.randn(4, 6, 4), factors), batch_size=None, num_workers=0)

        diagnosis = diagnose(factory(batches), max_steps=8, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.step) == ("forward", 3)

    def test_a_data_loader_that_shuffles_gives_the_same_steps_each_time(self) -> None:
        def batches() -> Any:
            return DataLoader(TensorDataset(torch.randn(8, 6, 4), torch.tensor([1.0] * 7 + [BREAKING])), batch_size=None, shuffle=True)

        first, second = (diagnose(factory(batches), max_steps=20, loss_scale=64.0, seed=3) for _ in range(2))
        assert (first.cause, first.step, first.explanation) == ("forward", second.step, second.explanation)


@pytest.mark.parametrize("kind", ["forward", "scale", "data", "healthy"])
@pytest.mark.parametrize("precision", ["fp16", "fp16; head=fp32"])
class TestWhatItLeaves:
    def found(self, kind: str, precision: str) -> tuple[Diagnosis, Any, Any]:
        batches = factored(1.0, BREAKING if kind == "forward" else 1.0)
        if kind == "data":
            batches[1][0][0, 0] = INF
        before = deepcopy(batches)
        diagnosis = diagnose(factory(batches), precision=precision, loss_scale=2.0**40 if kind == "scale" else 64.0)
        return diagnosis, batches, before

    def test_the_batches_and_the_random_numbers(self, kind: str, precision: str) -> None:
        outside = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
        diagnosis, batches, before = self.found(kind, precision)
        assert diagnosis.cause == kind
        assert same_state(batches, before)
        now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
        assert same_state(now, outside)

    def test_a_record_that_can_be_kept(self, kind: str, precision: str) -> None:
        diagnosis, _, _ = self.found(kind, precision)
        text = diagnosis.to_json()
        assert Diagnosis.from_json(text).to_json() == text
        assert len(diagnosis.evidence) >= diagnosis.replays - 1

    def test_it_takes_few_replays(self, kind: str, precision: str) -> None:
        diagnosis, _, _ = self.found(kind, precision)
        assert 0 < diagnosis.replays <= 6


class Interrupting:
    """A loss that is ended by Ctrl-C in one of its calls."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise KeyboardInterrupt
        return loss_of(model, batch)


class TestCtrlC:
    @pytest.mark.parametrize("call", range(1, 10))
    @pytest.mark.parametrize("precision", ["fp16", "fp16; head=fp32"])
    def test_it_tells_what_was_known_by_then(self, precision: str, call: int) -> None:
        """The first step is replayed twice, then two steps are trained, the second of which fails and is replayed."""
        outside = random.getstate(), torch.get_rng_state()
        interrupting, batches = Interrupting(call), factored(1.0, BREAKING, 1.0)
        before, torch_dispatch = deepcopy(batches), torch.is_autocast_enabled("cpu")
        diagnosis = diagnose(factory(batches, loss=interrupting), precision=precision, loss_scale=64.0)
        assert interrupting.calls == call, "it went on"
        assert diagnosis.interrupted
        assert not diagnosis.is_finding
        assert diagnosis.steps == (1 if call <= 3 else 2)
        assert diagnosis.loss is None
        assert same_state((random.getstate(), torch.get_rng_state()), outside)
        assert same_state(batches, before)
        assert torch.is_autocast_enabled("cpu") == torch_dispatch
        with halfstep.trace() as seen:
            torch.ones(2).mul(2.0)
        assert len(seen.ops) == 2
        assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis

    def test_after_a_finding_that_is_known(self) -> None:
        interrupting = Interrupting(12)
        diagnosis = diagnose(factory(factored(1.0), loss=interrupting), loss_scale=2.0**40, max_steps=99)
        assert (diagnosis.cause, diagnosis.interrupted, diagnosis.is_finding) == ("scale", True, True)

    def test_batches_that_are_ended(self) -> None:
        def batches() -> Iterator[Any]:
            yield from factored(1.0, 1.0, 1.0, 1.0)
            raise KeyboardInterrupt

        assert diagnose(factory(batches), max_steps=9, loss_scale=64.0).interrupted

    @pytest.mark.parametrize("call", [1, 2])
    def test_of_a_function(self, call: int) -> None:
        model, interrupting = Net(), Interrupting(call)
        ((batch),) = factored(1.0)
        try:
            diagnosis = diagnose(lambda: interrupting(model, batch), model=model, target="cuda")
        except KeyboardInterrupt:
            pytest.fail("it passed through")
        assert diagnosis.interrupted
