"""Correct loops: schedules, checkpoints, loaders, threads, exceptions, and halfstep's own engine."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from halfstep import LossScaler, MixedPrecision
from halfstep.records import Precision
from tests.watching.case import case
from tests.watching.data import classification, regression


class Session:
    """What one training has, and one step of it."""

    def __init__(self, *, fused: bool = False, scale: float = 128.0, rate: float = 0.05) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=rate, fused=fused)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.x, self.y = regression(8, 4, 1)

    def loss(self) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(self.net(self.x), self.y)

    def step(self) -> float:
        loss = self.loss()
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return float(loss.detach())


@case()
def a_schedule_that_moves_once_an_epoch() -> list[float]:
    session = Session(scale=2.0**19)
    schedule = lr_scheduler.CosineAnnealingLR(session.opt, T_max=3)
    losses = []
    for _ in range(3):
        losses += [session.step() for _ in range(6)]
        schedule.step()
    assert session.scaler.get_scale() < 2.0**19
    return losses


@case()
def a_schedule_that_waits_for_steps() -> list[float]:
    session = Session(scale=2.0**21)
    schedule = lr_scheduler.LinearLR(session.opt, start_factor=0.5, total_iters=5)
    losses = []
    for _ in range(12):
        before = session.scaler.get_scale()
        losses.append(session.step())
        if session.scaler.get_scale() >= before:
            schedule.step()
    return losses


@case()
def a_schedule_of_a_fused_optimizer_that_waits() -> list[float]:
    session = Session(fused=True, scale=2.0**19)
    session.scaler = LossScaler("cpu", init_scale=2.0**19)
    schedule = lr_scheduler.LambdaLR(session.opt, lambda count: 1.0 / (1 + count))
    losses = []
    for _ in range(10):
        skips = session.scaler.stats().skips
        losses.append(session.step())
        if session.scaler.stats().skips == skips:
            schedule.step()
    return losses


@case()
def a_schedule_that_follows_the_loss() -> list[float]:
    session = Session(scale=2.0**19)
    schedule = lr_scheduler.ReduceLROnPlateau(session.opt, patience=2)
    losses = []
    for _ in range(10):
        losses.append(session.step())
        schedule.step(losses[-1])
    return losses


@case()
def a_schedule_that_moves_in_every_step_and_none_is_skipped() -> list[float]:
    session = Session()
    schedule = lr_scheduler.OneCycleLR(session.opt, max_lr=0.05, total_steps=12)
    losses = []
    for _ in range(10):
        losses.append(session.step())
        schedule.step()
    return losses


@case()
def a_schedule_in_bf16() -> list[float]:
    x, y = classification(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    schedule = lr_scheduler.StepLR(opt, 2, gamma=0.9)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@case()
def saves_after_the_update() -> list[float]:
    session = Session()
    losses, file = [], io.BytesIO()
    for step in range(6):
        losses.append(session.step())
        if step % 2:
            torch.save({"net": session.net.state_dict(), "scaler": session.scaler.state_dict()}, file)
    return losses


@case()
def goes_on_from_a_checkpoint() -> list[float]:
    first = Session()
    losses = [first.step() for _ in range(3)]
    saved = copy.deepcopy([first.net.state_dict(), first.opt.state_dict(), first.scaler.state_dict()])
    second = Session(scale=2.0**16)
    second.net.load_state_dict(saved[0])
    second.opt.load_state_dict(saved[1])
    second.scaler.load_state_dict(saved[2])
    return losses + [second.step() for _ in range(3)]


@case()
def goes_back_to_the_best_weights() -> list[float]:
    session = Session()
    losses = [session.step() for _ in range(3)]
    best = copy.deepcopy(session.net.state_dict())
    session.step()
    session.net.load_state_dict(best)
    return losses + [session.step() for _ in range(3)]


@case()
def a_scaler_that_is_pickled_between_steps() -> list[float]:
    session = Session()
    losses = [session.step() for _ in range(3)]
    session.scaler = pickle.loads(pickle.dumps(session.scaler))
    return losses + [session.step() for _ in range(3)]


@case()
def sets_the_scale_between_steps() -> list[float]:
    session = Session(scale=1024.0)
    losses = []
    for step in range(6):
        losses.append(session.step())
        if step == 2:
            session.scaler.update(256.0)
    return losses


@case()
def epochs_of_a_loader() -> list[float]:
    x, y = classification(14, 4, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(3):
        total = 0.0
        for xs, ys in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(xs), ys)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            total += loss.item()
        losses.append(total)
    return losses


def steps(session: Session, count: int) -> Iterator[float]:
    for _ in range(count):
        yield session.step()


@case()
def a_generator_of_steps() -> list[float]:
    return list(steps(Session(), 5))


@case()
def trains_in_a_thread() -> list[float]:
    losses: list[float] = []
    thread = Thread(target=lambda: losses.extend(steps(Session(), 5)))
    thread.start()
    thread.join()
    return losses


@case()
def trains_in_two_threads_one_after_the_other() -> list[float]:
    with ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(lambda: list(steps(Session(), 4))) for _ in range(2))
        assert first.result() == second.result()
        return first.result()


@case()
def trains_two_models_in_two_threads() -> list[float]:
    sessions = [Session(rate=0.05), Session(rate=0.02)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda session: list(steps(session, 5)), sessions))
    return results[0]


@case()
def tries_again_after_a_forward_that_fails() -> list[float]:
    session = Session()
    losses = []
    for step in range(6):
        for attempt in range(2):
            try:
                with torch.autocast("cpu", dtype=torch.float16):
                    prediction = session.net(session.x)
                    if step in {1, 3} and attempt == 0:
                        raise torch.OutOfMemoryError("allocator is out of memory")
                    loss = F.mse_loss(prediction, session.y)
                session.scaler.scale(loss).backward()
                break
            except torch.OutOfMemoryError:
                session.opt.zero_grad()
        session.scaler.step(session.opt)
        session.scaler.update()
        session.opt.zero_grad()
        losses.append(loss.item())
    return losses


def out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("allocator is out of memory")


@case()
def tries_again_after_a_backward_that_fails() -> list[float]:
    session = Session()
    losses = []
    for step in range(6):
        loss = session.loss()
        handle = session.net.get_parameter("0.weight").register_hook(out_of_memory) if step == 2 else None
        try:
            session.scaler.scale(loss).backward()
        except torch.OutOfMemoryError:
            session.opt.zero_grad()
            if handle is not None:
                handle.remove()
            losses.append(session.step())
            session.opt.zero_grad()
            continue
        session.scaler.step(session.opt)
        session.scaler.update()
        session.opt.zero_grad()
        losses.append(loss.item())
    return losses


def by_engine(precision: Precision, **settings: Any) -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    amp = MixedPrecision(net, opt, precision, scheduler=lr_scheduler.StepLR(opt, 4), **settings)
    return [amp.train_step(lambda xs, ys: F.mse_loss(net(xs), ys), x, y).loss for _ in range(6)]


@case()
def the_engine_in_fp16() -> list[float]:
    return by_engine("fp16", scaler=LossScaler("cpu", init_scale=2.0**18))


@case()
def the_engine_in_bf16() -> list[float]:
    return by_engine("bf16")


@case()
def the_engine_in_fp32() -> list[float]:
    return by_engine("fp32", max_grad_norm=1.0)


@case()
def the_engine_accumulates_and_clips() -> list[float]:
    return by_engine("fp16", accumulate=2, max_grad_norm=1.0, scaler=LossScaler("cpu", init_scale=64.0))


@case()
def the_engine_by_its_own_calls() -> list[float]:
    x, y = classification(12, 4, 3)
    net = nn.Linear(4, 3)
    amp = MixedPrecision(net, torch.optim.AdamW(net.parameters(), lr=0.05, fused=True), "fp16", accumulate=3, max_grad_norm=1.0)
    losses = []
    for _ in range(4):
        for xs, ys in amp.micro_batches(list(zip(x.split(4), y.split(4), strict=True))):
            with amp.autocast():
                loss = F.cross_entropy(net(xs), ys)
            amp.backward(loss)
            record = amp.step()
            if record is not None:
                losses.append(record.loss)
    return losses
