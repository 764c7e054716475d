"""Nothing is seen of a watch: what is trained may go, and warnings are those without it."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from tests.watching.sessions import Session

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class TestNothingIsKept:
    def test_what_is_trained_may_go(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
            for steps in (3, 60):
                session = Session(norm=True)
                schedule = torch.optim.lr_scheduler.LinearLR(session.optimizer)
                for _ in range(steps):
                    loss = session.step()
                    schedule.step()
                kept: list[Any] = [ref(each) for each in (session.model, session.optimizer, session.scaler, schedule, loss)]
                del session, schedule, loss
                gc.collect()
                assert [each() for each in kept] == [None] * 5
            seen.flush()

    def test_its_parameters_may_go(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            session = Session()
            for _ in range(3):
                session.step()
            kept = [ref(each) for each in session.model.parameters()]
            del session
            gc.collect()
            assert [each() for each in kept] == [None] * len(kept)

    def test_a_loss_may_go_at_once(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=()):
            session = Session()
            assert [ref(session.step())() for _ in range(45)] == [None] * 45

    def test_a_window_keeps_no_gradients(self, tmp_path: Path) -> None:
        session = Session()
        with halfstep.watch(tmp_path, sinks=()):
            session.scaler.scale(session.model(session.x).mean()).backward()
            weights: Any = [*session.model.parameters()]
            kept = [ref(each.grad) for each in weights]
            session.optimizer.zero_grad()
            assert [each() for each in kept] == [None] * len(kept)


def made_wrongly() -> None:
    """Each of these lines draws a warning of torch's."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    schedule.step()
    schedule.step(2)
    torch.amp.GradScaler("cuda")
    torch.cuda.amp.GradScaler()
    with torch.autocast("cpu", dtype=torch.float64):
        pass
    with torch.autocast("cuda", dtype=torch.float16):
        pass
    amp: Any = torch
    with amp.cuda.amp.autocast(), amp.cpu.amp.autocast():
        pass
    weight.grad = torch.ones(2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    list(DataLoader(TensorDataset(torch.ones(2)), num_workers=0, prefetch_factor=None))
    nn.utils.clip_grad_norm_([], 1.0)


def backward_of_old() -> None:
    torch.autograd.backward(torch.ones((), requires_grad=True), grad_variables=torch.ones(()))


def warnings_of(run: Callable[[], None]) -> list[tuple[str, str, str, int]]:
    torch.optim.lr_scheduler.LRScheduler  # noqa: B018 - it is loaded before anything is counted
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [(each.category.__name__, str(each.message), each.filename, each.lineno) for each in seen]


def test_warnings_of_torch_name_the_lines_that_they_name_without_a_watch(tmp_path: Path, untouched: None) -> None:
    alone = warnings_of(made_wrongly)
    with halfstep.watch(tmp_path, sinks=()):
        watched = warnings_of(made_wrongly)
    assert watched == alone
    own = {line for _, _, file, line in alone if file == __file__}
    assert len(own) >= 4


def test_warnings_of_a_backward_pass_name_its_line(tmp_path: Path) -> None:
    alone = warnings_of(backward_of_old)
    with halfstep.watch(tmp_path, sinks=()):
        watched = warnings_of(backward_of_old)
    assert [file for _, _, file, _ in alone] == [__file__]
    assert watched == alone
