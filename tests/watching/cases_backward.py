"""Backward passes without the loss scale, or inside of the autocast region."""

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
def drops_the_scaled_loss() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss)
        loss.backward()  # alert: unscaled_backward
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def adds_an_auxiliary_loss_unscaled() -> list[float]:
    x, y = classification(10, 5, 3)
    trunk, main, side = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    opt = torch.optim.AdamW([*trunk.parameters(), *main.parameters(), *side.parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            features = trunk(x).relu()
            loss, auxiliary = F.cross_entropy(main(features), y), side(features).float().square().mean()
        scaler.scale(loss).backward(retain_graph=True)
        auxiliary.backward()  # alert: unscaled_backward
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def forgets_the_scale_in_the_last_micro_batch() -> list[float]:
    x, y = regression(12, 3, 1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = LossScaler("cpu", init_scale=512.0)
    losses = []
    for _ in range(3):
        for index, (xs, ys) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(xs), ys) / 3
            if index < 2:
                scaler.scale(loss).backward()
            else:
                loss.backward()  # alert: unscaled_backward
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def scales_one_half_of_the_discriminator() -> list[float]:
    real, _ = regression(8, 4, 1)
    critic = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))
    opt = torch.optim.Adam(critic.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        fake = torch.randn(8, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            on_real = F.softplus(-critic(real).float()).mean()
            on_fake = F.softplus(critic(fake).float()).mean()
        scaler.scale(on_real).backward()
        on_fake.backward()  # alert: unscaled_backward
        scaler.step(opt)
        scaler.update()
        losses.append(on_real.item())
    return losses


def spread(loss: Tensor) -> None:
    torch.autograd.backward([loss])  # alert: unscaled_backward


@case(through=(spread,))
def goes_backward_through_a_function() -> list[float]:
    x, y = regression(6, 4, 4)
    net = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss.detach())
        spread(loss)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case(raises=AssertionError, match="_scale is None")
def never_scales_at_all() -> list[float]:
    x, y = classification(6, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()  # alert: unscaled_backward
        scaler.step(opt)
        scaler.update()
    return []


@case()
def penalizes_weights_by_a_second_pass() -> list[float]:
    x, y = regression(8, 5, 1)
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1))
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for step in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        if step >= 2:
            penalty = sum((p.square().sum() for p in net.parameters()), torch.zeros(())) * 1e-3
            penalty.backward()  # alert: unscaled_backward
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def indents_backward_too_far() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
            scaler.scale(loss).backward()  # alert: backward_in_autocast
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def goes_backward_inside_in_bf16() -> list[float]:
    x, y = classification(9, 4, 3)
    net = nn.Linear(4, 3)
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()  # alert: backward_in_autocast
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def wraps_the_whole_step() -> list[float]:
    x, y = regression(8, 3, 3)
    net = nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for _ in range(5):
        with torch.autocast("cpu"):
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()  # alert: backward_in_autocast
            opt.step()
            losses.append(loss.item())
    return losses


class Learner:
    """A trainer whose methods were made to run in a region."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def lead(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()  # alert: backward_in_autocast

    def learn(self, x: Tensor, y: Tensor) -> float:
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.net(x), y)
            self.lead(loss)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


@case(through=(Learner,))
def goes_backward_in_a_method_that_a_region_calls() -> list[float]:
    x, y = regression(8, 4, 1)
    learner = Learner()
    return [learner.learn(x, y) for _ in range(4)]


@case()
def decorates_a_step_that_goes_backward() -> list[float]:
    x, y = regression(6, 5, 2)
    net = nn.Linear(5, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)

    @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
    def gradients() -> float:
        loss = F.mse_loss(net(x), y)
        loss.backward()  # alert: backward_in_autocast
        return loss.item()

    losses = []
    for _ in range(4):
        losses.append(gradients())
        opt.step()
        opt.zero_grad()
    return losses


@case()
def accumulates_inside() -> list[float]:
    x, y = regression(16, 4, 1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(3):
        for part in range(4):
            rows = slice(4 * part, 4 * part + 4)
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(net(x[rows]), y[rows]) / 4
                scaler.scale(loss).backward()  # alert: backward_in_autocast
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
