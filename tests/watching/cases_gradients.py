"""Loops that handle gradients by hand, while they are scaled or not."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.watching.case import case
from tests.watching.data import classification, regression


class Loop:
    """A model, and what trains it."""

    def __init__(self, *, fused: bool = False, scale: float = 128.0) -> None:
        self.x, self.y = regression(8, 4, 2)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def backward(self) -> float:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.net(self.x), self.y)
        self.scaler.scale(loss).backward()
        return loss.item()

    def gradients(self) -> list[Any]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def finish(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()


@case()
def clamps_the_data_of_gradients() -> list[float]:
    loop, losses = Loop(), []
    for _ in range(4):
        losses.append(loop.backward())
        for p in loop.net.parameters():
            p.grad.data.clamp_(min=-0.5, max=0.5)  # type: ignore[union-attr]  # alert: clip_before_unscale
        loop.finish()
    return losses


@case()
def replaces_gradients_by_clamped_ones() -> list[float]:
    loop, losses = Loop(), []
    for _ in range(4):
        losses.append(loop.backward())
        for p in loop.net.parameters():
            p.grad = p.grad.clamp(-0.5, 0.5)  # type: ignore[union-attr]  # alert: clip_before_unscale
        loop.finish()
    return losses


@case(also=("scaled_norm_logged",))
def shrinks_gradients_in_place_by_their_norm() -> list[float]:
    loop, losses = Loop(scale=512.0), []
    for _ in range(4):
        losses.append(loop.backward())
        gradients = loop.gradients()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for index in range(len(gradients)):
            gradients[index] *= factor  # alert: clip_before_unscale
        loop.finish()
    return losses


@case()
def averages_scaled_gradients_over_a_window() -> list[float]:
    """To divide by a number that knows nothing of gradients is right before and after unscaling."""
    loop, losses = Loop(), []
    for _ in range(5):
        losses.append(sum(loop.backward() for _ in range(3)) / 3)
        for p in loop.net.parameters():
            if p.grad is not None:
                p.grad.div_(3)
        loop.finish()
    return losses


@case()
def weighs_scaled_gradients_of_one_layer() -> list[float]:
    loop, losses = Loop(), []
    for _ in range(5):
        losses.append(loop.backward())
        for p in loop.net.get_submodule("0").parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        loop.finish()
    return losses


@case()
def clamps_weights_after_each_step() -> list[float]:
    loop, losses, largest = Loop(), [], []
    for _ in range(5):
        losses.append(loop.backward())
        loop.finish()
        with torch.no_grad():
            for p in loop.net.parameters():
                p.data.clamp_(-0.7, 0.7)
            largest.append(max(p.norm().item() for p in loop.net.parameters()))
    assert max(largest) < 4.0
    return losses


@case()
def measures_after_the_step() -> list[float]:
    """The step has unscaled them by then."""
    loop, losses, norms = Loop(), [], []
    for _ in range(5):
        losses.append(loop.backward())
        loop.scaler.step(loop.opt)
        norms.append(sum(g.norm().item() for g in loop.gradients()))
        loop.scaler.update()
        loop.opt.zero_grad()
    assert norms[0] < 10.0
    return losses


@case()
def adds_noise_after_unscaling() -> list[float]:
    loop, losses = Loop(), []
    for _ in range(5):
        losses.append(loop.backward())
        loop.scaler.unscale_(loop.opt)
        for g in loop.gradients():
            g.add_(torch.randn_like(g) * 1e-3).clamp_(-1.0, 1.0)
        loop.finish()
    return losses


@case()
def moves_inputs_along_the_sign_of_scaled_gradients() -> list[float]:
    x, y = classification(8, 5, 2)
    net = nn.Linear(5, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            first = F.cross_entropy(net(inputs), y)
        (slope,) = torch.autograd.grad(scaler.scale(first), inputs)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x + 0.01 * slope.sign()), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def counts_gradients_that_are_not_finite() -> list[float]:
    loop, losses, found = Loop(scale=2.0**17), [], 0
    for _ in range(10):
        losses.append(loop.backward())
        found += sum(int((~g.isfinite()).sum()) for g in loop.gradients())
        loop.finish()
    assert found > 0
    return losses
