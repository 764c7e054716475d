"""Autocast regions that last too long, or that are of another device."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


@case(also=("backward_in_autocast",))
def trains_in_one_region_of_bf16() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16):  # alert: loop_inside_autocast
        for _ in range(5):
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def one_epoch(net: nn.Module, opt: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor, y: Tensor) -> list[float]:
    losses = []
    for xs, ys in zip(x.split(5), y.split(5), strict=True):
        loss = F.cross_entropy(net(xs), ys)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case(also=("backward_in_autocast",))
def calls_an_epoch_in_a_region() -> list[float]:
    x, y = classification(15, 5, 3)
    net = nn.Linear(5, 3)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    losses = []
    for _ in range(2):
        with torch.autocast(device_type="cpu", dtype=torch.float16):  # alert: loop_inside_autocast
            losses += one_epoch(net, opt, scaler, x, y)
    return losses


@case(also=("backward_in_autocast",))
def decorates_the_whole_training() -> list[float]:
    x, y = regression(6, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)

    @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]  # alert: loop_inside_autocast
    def train() -> list[float]:
        losses = []
        for _ in range(4):
            loss = F.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return losses

    result: list[float] = train()
    return result


@case()
def enters_a_region_by_a_stack_and_stays() -> list[float]:
    x, y = regression(8, 4, 4)
    net = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=256.0)
    losses = []
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype=torch.float16))  # alert: loop_inside_autocast
        for _ in range(4):
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            with torch.autocast("cpu", enabled=False):
                scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
    return losses


@case(ignores=("User provided device_type of 'cuda'", "CUDA is not available"))
def autocasts_cuda_on_a_cpu() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):  # alert: autocast_device_mismatch
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class CudaNet(nn.Module):
    """A model that was written for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):  # alert: autocast_device_mismatch
            result: Tensor = self.layers(x)
        return result


@case(through=(CudaNet,), ignores=("User provided device_type of 'cuda'", "CUDA is not available"))
def autocasts_cuda_in_bf16_in_a_method() -> list[float]:
    x, y = classification(10, 6, 2)
    net = CudaNet()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case(ignores=("User provided device_type of 'cuda'", "CUDA is not available", "`torch.cuda.amp.autocast"))
def autocasts_cuda_by_its_old_name() -> list[float]:
    x, y = regression(6, 4, 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(4):
        with torch.cuda.amp.autocast():  # alert: autocast_device_mismatch
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
