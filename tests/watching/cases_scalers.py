"""Scalers that are made anew, that nobody uses, that nothing calls for, and none where one is needed."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


@case()
def makes_a_scaler_in_each_step() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # alert: scaler_created_in_loop
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


def run_epoch(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # alert: scaler_created_in_loop
    losses = []
    for xs, ys in zip(x.split(4), y.split(4), strict=True):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(xs), ys)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case(through=(run_epoch,))
def makes_a_scaler_in_each_epoch() -> list[float]:
    x, y = classification(12, 5, 3)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    return [loss for _ in range(4) for loss in run_epoch(net, opt, x, y)]


def fresh_scaler() -> torch.amp.GradScaler:
    return LossScaler("cpu", init_scale=128.0)  # alert: scaler_created_in_loop


@case(through=(fresh_scaler,))
def asks_a_function_for_a_scaler_in_each_step() -> list[float]:
    x, y = regression(6, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(4):
        scaler = fresh_scaler()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def scales_bf16() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # alert: scaler_with_bf16
    losses = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class Bundle:
    """A trainer that leaves the dtype of its region to torch."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        self.scaler = torch.amp.GradScaler("cpu")  # alert: scaler_with_bf16

    def train(self, x: Tensor, y: Tensor) -> float:
        with torch.autocast("cpu"):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return loss.item()


@case(through=(Bundle,))
def scales_the_default_dtype_of_a_cpu() -> list[float]:
    x, y = classification(10, 4, 3)
    bundle = Bundle(nn.Linear(4, 3))
    return [bundle.train(x, y) for _ in range(12)]


def an_early_scaler() -> tuple[Any]:
    return (LossScaler("cpu", init_scale=256.0),)


@case(before=an_early_scaler)
def scales_bf16_by_a_scaler_of_earlier(scaler: LossScaler) -> list[float]:
    x, y = regression(8, 5, 1)
    net = nn.Linear(5, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()  # alert: scaler_with_bf16
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def makes_a_scaler_and_trains_in_fp32() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")  # alert: scaler_unused
    assert scaler.is_enabled()
    losses = []
    for _ in range(12):
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


class Owner:
    """A trainer with a scaler left over."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.opt = net, torch.optim.Adam(net.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # alert: scaler_unused

    def train(self, x: Tensor, y: Tensor) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        return loss.item()


@case(through=(Owner,))
def owns_a_scaler_and_trains_in_bf16() -> list[float]:
    x, y = classification(8, 6, 2)
    owner = Owner(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    return [owner.train(x, y) for _ in range(12)]


@case(also=("fp16_without_scaler",))
def makes_a_scaler_and_forgets_it_in_fp16() -> list[float]:
    x, y = regression(8, 3, 3)
    net = nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu")  # alert: scaler_unused
    assert scaler.is_enabled()
    losses = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def trains_in_fp16_without_a_scaler() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):  # alert: fp16_without_scaler
            loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def decorates_a_forward_in_fp16() -> list[float]:
    x, y = classification(10, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

    @torch.autocast("cpu", dtype=torch.float16)  # type: ignore[untyped-decorator]  # alert: fp16_without_scaler
    def error() -> Tensor:
        return F.cross_entropy(net(x), y)

    losses = []
    for _ in range(8):
        loss = error()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def switches_its_scaler_off_and_stays_in_fp16() -> list[float]:
    x, y = regression(8, 5, 1)
    net = nn.Linear(5, 1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):  # alert: fp16_without_scaler
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class HalfNet(nn.Module):
    """A model that enters its region by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):  # alert: fp16_without_scaler
            result: Tensor = self.outer(self.inner(x).relu())
        return result.float()


@case(through=(HalfNet,))
def accumulates_in_a_model_of_half_precision() -> list[float]:
    x, y = regression(16, 4, 1)
    net = HalfNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        for xs, ys in zip(x.split(8), y.split(8), strict=True):
            loss = F.mse_loss(net(xs), ys) / 2
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
