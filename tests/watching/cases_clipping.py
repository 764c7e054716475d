"""Gradients that are clipped or measured while the loss scale is still in them."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


@case()
def clips_the_norm_after_backward() -> list[float]:
    x, y = regression(12, 6, 2)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # alert: clip_before_unscale
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def clips_first_and_unscales_second() -> list[float]:
    images, labels = classification(8, 9, 3)
    classifier = nn.Linear(9, 3)
    adam = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**11)
    losses = []
    for _ in range(4):
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            loss = F.cross_entropy(classifier(images), labels)
        scaler.scale(loss).backward()
        clip_grad_norm_(classifier.parameters(), max_norm=0.5)  # alert: clip_before_unscale
        scaler.unscale_(adam)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def limit_elements(parameters: Any, largest: float) -> None:
    clip_grad_value_(parameters, largest)  # alert: clip_before_unscale


@case(through=(limit_elements,))
def clips_elements_in_a_function() -> list[float]:
    x, y = regression(10, 4, 1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            error = (net(x).float() - y).square().mean()
        scaler.scale(error).backward()
        limit_elements(net.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        losses.append(error.item())
    return losses


@case()
def clamps_each_gradient_by_hand() -> list[float]:
    x, y = regression(6, 5, 5)
    net = nn.Linear(5, 5)
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.l1_loss(net(x).float(), y)
        scaler.scale(loss).backward()
        for weight in net.parameters():
            weight.grad.clamp_(-0.25, 0.25)  # type: ignore[union-attr]  # alert: clip_before_unscale
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case(also=("scaled_norm_logged",))
def shrinks_gradients_to_a_norm_of_its_own() -> list[float]:
    x, y = regression(8, 3, 2)
    net = nn.Sequential(nn.Linear(3, 7), nn.GELU(), nn.Linear(7, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))
        if norm > 1.0:
            for g in gradients:
                g.mul_(1.0 / norm)  # alert: clip_before_unscale
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class Fitter:
    """A trainer whose clipping was chosen by a configuration."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=3e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        self.clip = partial(clip_grad_norm_, max_norm=2.0)

    def fit(self, x: Any, y: Any) -> float:
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.smooth_l1_loss(self.net(x).float(), y)
        self.scaler.scale(loss).backward()
        self.finish()
        return loss.item()

    def finish(self) -> None:
        self.clip(self.net.parameters())  # alert: clip_before_unscale
        self.scaler.step(self.opt)
        self.scaler.update()


@case(through=(Fitter,))
def clips_by_a_partial_in_a_class() -> list[float]:
    x, y = regression(8, 6, 3)
    fitter = Fitter(nn.Linear(6, 3))
    return [fitter.fit(x, y) for _ in range(5)]


@case()
def clips_at_the_end_of_a_window() -> list[float]:
    x, y = regression(16, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(3):
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(xs), ys) / 4
            scaler.scale(loss).backward()
        clip_grad_norm_(net.parameters(), 0.3)  # alert: clip_before_unscale
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def unscales_one_optimizer_and_clips_both() -> list[float]:
    x, y = regression(8, 5, 1)
    encoder, head = nn.Linear(5, 6), nn.Linear(6, 1)
    slow, fast = torch.optim.SGD(encoder.parameters(), lr=0.01), torch.optim.Adam(head.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(4):
        slow.zero_grad()
        fast.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(encoder(x).relu()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(fast)
        clip_grad_norm_([*encoder.parameters(), *head.parameters()], 1.0)  # alert: clip_before_unscale
        scaler.step(slow)
        scaler.step(fast)
        scaler.update()
        losses.append(loss.item())
    return losses


def a_scaler() -> tuple[torch.amp.GradScaler]:
    return (torch.amp.GradScaler("cpu", init_scale=2.0**8),)


@case(before=a_scaler)
def clips_with_a_scaler_of_earlier(scaler: torch.amp.GradScaler) -> list[float]:
    x, y = classification(9, 4, 3)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], 1.0)  # alert: clip_before_unscale
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def logs_the_norm_of_each_layer() -> list[float]:
    x, y = regression(8, 6, 2)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    losses, history = [], []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        history.append({name: p.grad.norm().item() for name, p in net.named_parameters()})  # type: ignore[union-attr]  # alert: scaled_norm_logged
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


def norm_of(module: nn.Module) -> float:
    parts = [torch.linalg.vector_norm(p.grad) for p in module.parameters() if p.grad is not None]  # alert: scaled_norm_logged
    return float(torch.linalg.vector_norm(torch.stack(parts)))


@case(through=(norm_of,))
def logs_a_norm_every_other_step() -> list[float]:
    x, y = classification(12, 5, 4)
    net = nn.Linear(5, 4)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, norms = [], []
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        if step % 2:
            norms.append(norm_of(net))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def logs_the_total_norm() -> list[float]:
    x, y = regression(8, 4, 3)
    net = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=100.0)
    losses, norms = [], []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))  # alert: scaled_norm_logged
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def measures_by_clipping_to_infinity() -> list[float]:
    x, y = regression(10, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.NAdam(net.parameters(), lr=1e-2)
    scaler = LossScaler("cpu", init_scale=2.0**6)
    losses, norms = [], []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        norms.append(float(clip_grad_norm_(net.parameters(), math.inf)))  # alert: scaled_norm_logged
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def sums_squares_by_hand() -> list[float]:
    x, y = regression(10, 4, 2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses, norms = [], []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        squares = 0.0
        for p in net.parameters():
            if p.grad is not None:
                squares += p.grad.pow(2).sum().item()  # alert: scaled_norm_logged
        norms.append(squares**0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def logs_the_norm_of_all_gradients_in_one_vector() -> list[float]:
    x, y = classification(8, 6, 2)
    net = nn.Linear(6, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    losses, norms = [], []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        norms.append(torch.norm(torch.cat([p.grad.flatten() for p in net.parameters()])))  # type: ignore[union-attr]  # alert: scaled_norm_logged
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses
