"""Correct loops: how losses are scaled, summed and accumulated, and how steps are passed over."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


@case()
def accumulates_with_division() -> list[float]:
    x, y = regression(12, 4, 1)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    losses = []
    for _ in range(5):
        total = 0.0
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(xs), ys) / 3
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(total)
    return losses


@case()
def accumulates_without_division() -> list[float]:
    x, y = classification(12, 5, 3)
    net = nn.Linear(5, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        for xs, ys in zip(x.split(6), y.split(6), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(xs), ys)
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def ends_in_an_incomplete_window() -> list[float]:
    x, y = regression(8, 3, 2)
    net = nn.Linear(3, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(2):
        for index in range(7):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(x), y)
            scaler.scale(loss / 3).backward()
            losses.append(loss.item())
            if index % 3 == 2 or index == 6:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
    return losses


@case()
def leaves_the_last_window_unfinished() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for index in range(10):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y) / 4
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if (index + 1) % 4 == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return losses


@case()
def divides_what_is_scaled() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for index in range(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        (scaler.scale(loss) / 2).backward()
        losses.append(loss.item())
        if index % 2:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return losses


@case()
def sums_losses_that_are_scaled() -> list[float]:
    x, y = classification(10, 5, 2)
    trunk, main, side = nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(6, 1)
    opt = torch.optim.Adam([*trunk.parameters(), *main.parameters(), *side.parameters()], lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            features = trunk(x).relu()
            loss, penalty = F.cross_entropy(main(features), y), side(features).float().square().mean()
        total = scaler.scale(loss) + 0.1 * scaler.scale(penalty)
        total.backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def goes_backward_twice_through_one_graph() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = net(x)
            near, far = F.mse_loss(prediction, y), F.l1_loss(prediction.float(), y)
        scaler.scale(near).backward(retain_graph=True)
        scaler.scale(far).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        losses.append(near.item())
    return losses


@case()
def scales_a_list_of_losses() -> list[float]:
    x, y = regression(9, 3, 3)
    nets = nn.ModuleList([nn.Linear(3, 1) for _ in range(3)])
    opt = torch.optim.SGD(nets.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            parts = [F.mse_loss(net(x), y[:, index : index + 1]) for index, net in enumerate(nets)]
        for scaled in scaler.scale(parts):
            scaled.backward()
        scaler.step(opt)
        scaler.update()
        losses.append(sum(part.item() for part in parts))
    return losses


@case()
def scales_the_losses_of_the_rows() -> list[float]:
    x, y = classification(10, 4, 3)
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            rows = F.cross_entropy(net(x), y, reduction="none")
        scaler.scale(rows).mean().backward()
        scaler.step(opt)
        scaler.update()
        losses.append(rows.mean().item())
    return losses


@case()
def multiplies_by_a_scaled_one() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        factor = scaler.scale(torch.ones(()))
        (loss * factor).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def goes_backward_by_a_function_of_autograd() -> list[float]:
    x, y = regression(8, 5, 2)
    net = nn.Linear(5, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        torch.autograd.backward([scaler.scale(loss)], inputs=list(net.parameters()))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def assigns_scaled_gradients() -> list[float]:
    x, y = regression(8, 3, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        for p, g in zip(net.parameters(), torch.autograd.grad(scaler.scale(loss), list(net.parameters())), strict=True):
            p.grad = g
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def passes_over_losses_that_are_not_finite() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for step in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y * (math.inf if step in {2, 5} else 1.0))
        if not torch.isfinite(loss):
            continue
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def passes_over_steps_and_updates() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y + (60.0 if step == 3 else 0.0))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if clip_grad_norm_(net.parameters(), 1.0) > 20.0:
            scaler.update()
            continue
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert len(losses) == 7
    return losses


@case()
def removes_gradients_by_hand() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(6):
        for p in net.parameters():
            p.grad = None
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def zeroes_gradients_by_hand() -> list[float]:
    x, y = regression(8, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.zero_()
        losses.append(loss.item())
    return losses


@case(also=("scaled_norm_logged",))
def divides_a_norm_by_the_scale() -> list[float]:
    """The norm that it logs is the true one, though that it computes first is not."""
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses, norms = [], []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]) / scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case(also=("fp16_without_scaler",))
def scales_by_a_number_of_its_own() -> list[float]:
    """A static scale without a scaler: right as long as nothing overflows."""
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        (loss * 512.0).backward()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.div_(512.0)
        opt.step()
        losses.append(loss.item())
    return losses
