"""What stands around the functions of torch: it lets exceptions pass, and knows the pass over the data."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep import MixedPrecision
from halfstep.journal import read_run
from tests.watching.data import regression

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class Session:
    def __init__(self, *, rows: int = 24) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.loader = self.make(rows)

    def make(self, rows: int, *, batch: int = 4, **settings: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*regression(rows, 4, 1)), batch_size=batch, **settings)

    def step(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(F.mse_loss(self.model(x), y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def evaluate(self, loader: DataLoader[Any], guard: Any = torch.no_grad) -> None:
        self.model.eval()
        with guard():
            for x, y in loader:
                F.mse_loss(self.model(x), y)
        self.model.train()


def epochs(folder: Path, train: Callable[[Session], object], **settings: Any) -> list[int | None]:
    session = Session(**settings)
    with halfstep.watch(folder, sinks=["jsonl"]):
        train(session)
    return [each.epoch for each in read_run(folder).records()]


class TestEpochs:
    def test_each_pass_over_the_data_is_one(self, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            for _ in range(4):
                for batch in session.loader:
                    session.step(*batch)

        assert epochs(tmp_path, train, rows=60) == [1] * 15 + [2] * 15 + [3] * 15 + [4] * 15

    @pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("same", [True, False], ids=["the same data", "other data"])
    def test_an_evaluation_is_none(self, same: bool, guard: Any, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            other = session.make(4)
            for _ in range(3):
                for place, batch in enumerate(session.loader):
                    if place == 2:
                        session.evaluate(other, guard)
                        session.evaluate(other, guard)
                    session.step(*batch)
                session.evaluate(other, guard)

        def train_and_evaluate_on_the_same(session: Session) -> None:
            for _ in range(3):
                for batch in session.loader:
                    session.step(*batch)
                session.evaluate(session.loader, guard)

        if same:
            assert epochs(tmp_path, train_and_evaluate_on_the_same) == [1] * 6 + [3] * 6 + [5] * 6  # Passes of the loader.
        else:
            assert epochs(tmp_path, train) == [1] * 6 + [2] * 6 + [3] * 6

    def test_two_loaders_count_for_themselves(self, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            short = session.make(8)
            for _ in range(2):
                for batch in session.loader:
                    session.step(*batch)
                for batch in short:
                    session.step(*batch)

        assert epochs(tmp_path, train) == [1] * 6 + [1] * 2 + [2] * 6 + [2] * 2

    def test_an_iterator_that_is_begun_anew_by_hand_is_the_next_pass(self, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            batches: Iterator[Any] = iter(session.loader)
            for _ in range(8):
                try:
                    batch = next(batches)
                except StopIteration:
                    batches = iter(session.loader)
                    batch = next(batches)
                session.step(*batch)

        assert epochs(tmp_path, train) == [1] * 6 + [2] * 2

    def test_a_pass_that_began_before_the_watch_has_no_number(self, tmp_path: Path) -> None:
        session = Session()
        batches = iter(session.loader)
        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            session.step(*next(batches))
            for batch in session.loader:
                session.step(*batch)
        assert [each.epoch for each in read_run(tmp_path).records()] == [None] + [1] * 6

    def test_a_pass_that_began_before_has_none_after_others_either(self, tmp_path: Path) -> None:
        session = Session()
        batches = iter(session.loader)
        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            for batch in session.make(8):
                session.step(*batch)
            session.step(*next(batches))
        assert [each.epoch for each in read_run(tmp_path).records()] == [1, 1, None]

    def test_a_loader_that_is_made_anew_for_the_same_data_makes_the_next_pass(self, tmp_path: Path) -> None:
        data = TensorDataset(*regression(8, 4, 1))

        def train(session: Session) -> None:
            for _ in range(3):
                for batch in DataLoader(data, batch_size=4):
                    session.step(*batch)

        assert epochs(tmp_path, train) == [1, 1, 2, 2, 3, 3]

    def test_without_a_loader_it_is_not_known(self, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            for _ in range(3):
                session.step(*regression(4, 4, 1))

        assert epochs(tmp_path, train) == [None] * 3

    def test_the_steps_of_an_engine_have_it_too(self, tmp_path: Path) -> None:
        def train(session: Session) -> None:
            amp = MixedPrecision(session.model, session.optimizer, "bf16")
            for _ in range(2):
                for x, y in session.loader:
                    amp.train_step(lambda x, y: F.mse_loss(session.model(x), y), x, y)

        assert epochs(tmp_path, train) == [1] * 6 + [2] * 6


class TestExceptions:
    """What raises leaves nothing behind: what comes after it is seen as before."""

    def check(self, folder: Path, fail: Callable[[Session], None], error: type[Exception], match: str) -> None:
        session, (x, y) = Session(), regression(4, 4, 1)
        with halfstep.watch(folder, sinks=["jsonl"]) as seen:
            session.step(x, y)
            with pytest.raises(error, match=match):
                fail(session)
            session.scaler.update(4.0)
            for _ in range(3):
                session.step(x, y)
        assert [each.step for each in read_run(folder).records()] == [1, 2, 3, 4]
        assert [each.loss for each in read_run(folder).records()][1] > 0
        assert seen.alerts == ()

    def test_a_step_without_gradients(self, tmp_path: Path) -> None:
        def fail(session: Session) -> None:
            session.optimizer.zero_grad()
            session.scaler.step(session.optimizer)

        self.check(tmp_path, fail, AssertionError, "No inf checks were recorded")

    def test_unscaling_of_what_is_no_gradient(self, tmp_path: Path) -> None:
        def fail(session: Session) -> None:
            half = nn.Parameter(torch.ones(2, dtype=torch.float16))
            half.grad = torch.ones(2, dtype=torch.float16)
            session.scaler.unscale_(torch.optim.SGD([half]))

        self.check(tmp_path, fail, ValueError, "Attempting to unscale FP16 gradients")

    def test_a_backward_pass_without_a_graph(self, tmp_path: Path) -> None:
        self.check(tmp_path, lambda _: torch.ones(()).backward(), RuntimeError, "does not require grad")

    def test_a_step_that_an_optimizer_refuses(self, tmp_path: Path) -> None:
        def fail(session: Session) -> None:
            def refuse(*_: Any) -> None:
                raise ValueError("not now")

            (session.model(torch.ones(1, 4)).sum() * session.scaler.get_scale()).backward()
            hook = session.optimizer.register_step_pre_hook(refuse)
            try:
                session.optimizer.step()
            finally:
                hook.remove()
                session.optimizer.zero_grad()

        self.check(tmp_path, fail, ValueError, "not now")

    def test_an_update_to_what_is_no_scale(self, tmp_path: Path) -> None:
        self.check(tmp_path, lambda session: session.scaler.update(torch.ones(2)), AssertionError, "1-element")

    def test_a_region_that_is_left_by_an_exception(self, tmp_path: Path) -> None:
        def fail(session: Session) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                raise KeyError("batch")

        self.check(tmp_path, fail, KeyError, "batch")

    def test_a_region_of_a_dtype_that_there_is_none_of(self, tmp_path: Path) -> None:
        self.check(tmp_path, lambda _: torch.autocast(5).__enter__(), ValueError, "Expected `device_type` of type `str`")  # type: ignore[arg-type]

    def test_a_schedule_that_raises(self, tmp_path: Path) -> None:
        class Broken(torch.optim.lr_scheduler.LRScheduler):
            def get_lr(self) -> Any:
                raise ValueError("no rate")

        def fail(session: Session) -> None:
            Broken(session.optimizer)

        self.check(tmp_path, fail, ValueError, "no rate")
