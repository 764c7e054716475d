"""Schedules, checkpoints, parameters and buffers that drift away from what is trained."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression

TOO_LARGE = 2.0**19


@case(ignores=("Detected call of",))
def moves_a_schedule_in_skipped_steps() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE)
    losses = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()  # alert: schedule_moved_on_skip
        losses.append(loss.item())
    return losses


@case(ignores=("Detected call of",))
def moves_the_schedule_of_a_fused_optimizer() -> list[float]:
    x, y = classification(10, 5, 3)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)
    schedule = lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=12)
    scaler = LossScaler("cpu", init_scale=TOO_LARGE)
    losses = []
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        schedule.step()  # alert: schedule_moved_on_skip
        scaler.update()
        losses.append(loss.item())
    return losses


class Course:
    """A trainer with a schedule of two parts."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        warm, rest = lr_scheduler.ConstantLR(self.opt, 0.5, total_iters=3), lr_scheduler.ExponentialLR(self.opt, 0.95)
        self.schedule = lr_scheduler.SequentialLR(self.opt, [warm, rest], milestones=[3])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train(self, x: Tensor, y: Tensor, factor: float) -> float:
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.net(x) * factor, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.advance()
        return loss.item()

    def advance(self) -> None:
        self.schedule.step()  # alert: schedule_moved_on_skip


@case(through=(Course,), ignores=("The epoch parameter in `scheduler.step",))
def moves_a_schedule_past_one_bad_step() -> list[float]:
    x, y = regression(8, 6, 1)
    course = Course(nn.Linear(6, 1))
    return [course.train(x, y, factor=400.0 if step == 5 else 1.0) for step in range(10)]


@case()
def saves_between_step_and_update() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    saved: dict[str, Any] = {}
    losses = []
    for step in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        if step == 2:
            saved = {"model": net.state_dict(), "scaler": scaler.state_dict()}  # alert: state_saved_before_update
        scaler.update()
        losses.append(loss.item())
    assert saved["scaler"]["scale"] == 256.0
    return losses


def save(file: io.BytesIO, net: nn.Module, scaler: torch.amp.GradScaler) -> None:
    state = scaler.state_dict()  # alert: state_saved_before_update
    torch.save({"net": net.state_dict(), "scaler": state}, file)


@case(through=(save,))
def saves_by_a_function_in_every_epoch() -> list[float]:
    x, y = classification(12, 5, 2)
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    scaler = LossScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(2):
        for last, (xs, ys) in zip((False, True), zip(x.split(6), y.split(6), strict=True), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(xs), ys)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            if last:
                save(io.BytesIO(), net, scaler)
            scaler.update()
            losses.append(loss.item())
    return losses


@case()
def replaces_the_head_after_the_optimizer_was_made() -> list[float]:
    x, y = classification(9, 6, 3)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net[2] = nn.Linear(8, 3)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()  # alert: stale_parameters
        losses.append(loss.item())
    return losses


class Reader(nn.Module):
    """A model whose vocabulary grows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def grow(self, size: int) -> None:
        self.table.weight = nn.Parameter(torch.cat([self.table.weight.detach(), torch.zeros(size, 4)]))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.table(ids).mean(dim=1))
        return result


@case()
def grows_a_table_after_the_optimizer_was_made() -> list[float]:
    ids, y = torch.randint(0, 14, (8, 3)), torch.randint(0, 2, (8,))
    net = Reader()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    net.grow(4)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(ids), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: stale_parameters
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def trains_a_copy_of_what_the_optimizer_has() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net = copy.deepcopy(net)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()  # alert: stale_parameters
        losses.append(loss.item())
    return losses


@case(raises=AssertionError, match="No inf checks were recorded")
def makes_the_model_again_under_a_scaler() -> list[float]:
    x, y = regression(8, 3, 2)
    first = nn.Linear(3, 2)
    opt = torch.optim.AdamW(first.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    second = nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(second(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: stale_parameters
        scaler.update()
    return []


@case()
def parametrizes_a_weight_after_the_optimizer_was_made() -> list[float]:
    x, y = regression(8, 5, 2)
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    nn.utils.parametrizations.weight_norm(net[0])
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()  # alert: stale_parameters
        losses.append(loss.item())
    return losses


@case(also=("nonfinite_loss",))
def spoils_statistics_by_one_batch() -> list[float]:
    x, y = regression(12, 6, 1)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x * (1e7 if step == 4 else 1.0)), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: nonfinite_buffers@1
        scaler.update()
        losses.append(loss.item())
    assert not net.get_buffer("1.running_mean").isfinite().all()
    return losses


class Picture(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(1, 3, 3), "norm": nn.BatchNorm2d(3)})
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.stem["norm"](self.stem["conv"](x)).relu().mean(dim=(2, 3)))
        return result


@case(also=("nonfinite_loss",))
def spoils_statistics_under_a_fused_optimizer() -> list[float]:
    x, y = torch.randn(6, 1, 5, 5), torch.randint(0, 2, (6,))
    net = Picture()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(6):
        images = x.clone()
        if step == 3:
            images[0, 0, 2, 2] = 1e6
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(images), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)  # alert: nonfinite_buffers@stem.norm
        scaler.update()
        losses.append(loss.item())
    assert not net.get_buffer("stem.norm.running_var").isfinite().all()
    return losses
