"""Steps past the scaler, and updates that are missing or too many."""

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
def steps_scaled_gradients() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        opt.step()  # alert: optimizer_step_bypasses_scaler
        losses.append(loss.item())
    return losses


@case()
def steps_a_second_time() -> list[float]:
    x, y = classification(12, 5, 3)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.step()  # alert: optimizer_step_bypasses_scaler
        losses.append(loss.item())
    return losses


@case()
def unscales_and_steps_directly() -> list[float]:
    x, y = regression(10, 3, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()  # alert: optimizer_step_bypasses_scaler
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def hands_one_of_two_optimizers_to_the_scaler() -> list[float]:
    ids, y = torch.randint(0, 20, (8, 3)), torch.randn(8, 1)
    table, head = nn.Embedding(20, 4), nn.Linear(12, 1)
    for_table, for_head = torch.optim.SGD(table.parameters(), lr=1e-4), torch.optim.AdamW(head.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(4):
        for_table.zero_grad()
        for_head.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(table(ids).flatten(1)), y)
        scaler.scale(loss).backward()
        for_table.step()  # alert: optimizer_step_bypasses_scaler
        scaler.step(for_head)
        scaler.update()
        losses.append(loss.item())
    return losses


def advance(optimizer: Any) -> None:
    optimizer.step()  # alert: optimizer_step_bypasses_scaler


@case(through=(advance,))
def steps_a_fused_optimizer_in_a_function() -> list[float]:
    x, y = regression(8, 6, 2)
    net = nn.Linear(6, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    scaler = LossScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.huber_loss(net(x).float(), y)
        scaler.scale(loss).backward()
        advance(opt)
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def steps_by_the_method_that_a_schedule_wraps() -> list[float]:
    x, y = classification(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    losses = []
    for _ in range(2):
        for _ in range(3):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            opt.step()  # alert: optimizer_step_bypasses_scaler
            losses.append(loss.item())
        schedule.step()
    return losses


@case(raises=RuntimeError, match="unscale_.. has already been called")
def unscales_in_every_micro_batch() -> list[float]:
    x, y = regression(16, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    for index, (xs, ys) in enumerate(zip(x.split(4), y.split(4), strict=True)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(xs), ys) / 2
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # alert: missing_update
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if index % 2:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return []


class Careful:
    """A trainer that passes over steps whose gradients it does not like."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.opt = net, torch.optim.Adam(net.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)  # alert: missing_update
        if nn.utils.clip_grad_norm_(self.net.parameters(), 1.0) > 50.0:
            return
        self.scaler.step(self.opt)
        self.scaler.update()


@case(through=(Careful,), raises=RuntimeError, match="unscale_.. has already been called")
def returns_before_the_update() -> list[float]:
    x, y = regression(8, 5, 2)
    careful = Careful(nn.Linear(5, 2))
    for target in (y, y + 300.0, y):
        careful.step(x, target)
    return []


@case(raises=RuntimeError, match="step.. has already been called")
def forgets_the_update() -> list[float]:
    x, y = classification(10, 4, 3)
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: missing_update
    return []


@case(raises=RuntimeError, match="twice")
def forgets_the_update_of_a_loss_scaler() -> list[float]:
    x, y = regression(6, 3, 2)
    net = nn.Linear(3, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = LossScaler("cpu", init_scale=128.0)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: missing_update
    return []


@case()
def trains_layer_by_layer_without_an_update() -> list[float]:
    x, y = regression(8, 4, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net]
    for opt in optimizers:
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # alert: missing_update
        losses.append(loss.item())
    return losses


@case()
def updates_in_every_micro_batch() -> list[float]:
    x, y = regression(12, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    losses = []
    for index in range(9):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y) / 3
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if index % 3 == 2:
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()  # alert: repeated_update
        losses.append(loss.item())
    return losses


@case()
def updates_between_two_optimizers() -> list[float]:
    x, y = classification(8, 5, 2)
    body, head = nn.Linear(5, 6), nn.Linear(6, 2)
    first, second = torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
    losses = []
    for _ in range(6):
        first.zero_grad()
        second.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(head(body(x).tanh()), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.update()  # alert: repeated_update
        scaler.step(second)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def updates_for_each_of_its_optimizers() -> list[float]:
    x, y = regression(8, 4, 2)
    parts = [nn.Linear(4, 4), nn.Linear(4, 2)]
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2, fused=True) for part in parts]
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(parts[1](parts[0](x)), y)
        scaler.scale(loss).backward()
        for opt in optimizers:
            scaler.step(opt)
            scaler.update()  # alert: repeated_update
        for opt in optimizers:
            opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def sets_the_scale_within_a_window() -> list[float]:
    x, y = regression(8, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for index in range(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y) / 2
        scaler.scale(loss).backward()
        if index % 2 == 0:
            scaler.update(128.0)  # alert: repeated_update
        else:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def steps_a_table_while_the_rest_accumulates() -> list[float]:
    ids, y = torch.randint(0, 12, (6, 2)), torch.randn(6, 1)
    table, head = nn.Embedding(12, 3), nn.Linear(6, 1)
    often, seldom = torch.optim.SGD(table.parameters(), lr=0.1), torch.optim.AdamW(head.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3)
    losses = []
    for index in range(8):
        often.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(table(ids).flatten(1)), y)
        scaler.scale(loss).backward()
        scaler.step(often)
        if index % 4 == 3:
            scaler.step(seldom)
            seldom.zero_grad()
        scaler.update()  # alert: repeated_update
        losses.append(loss.item())
    return losses
