"""Correct loops: models with parts that are frozen, shared, copied, unused, recomputed, or of an odd kind."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


class Loop:
    """The step that these models share: fp16, scaled, clipped."""

    def __init__(self, *parameters: nn.Parameter, scale: float = 128.0) -> None:
        self.parameters = parameters
        self.opt = torch.optim.SGD(parameters, lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(self, loss: Any) -> float:
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return float(loss.detach())


@case()
def averages_of_the_weights_by_hand() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    average = copy.deepcopy(net).requires_grad_(False)
    loop, losses = Loop(*net.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        losses.append(loop.step(loss))
        with torch.no_grad():
            for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            average(x)
    return losses


@case()
def averages_of_the_weights_by_torch() -> list[float]:
    x, y = classification(8, 5, 2)
    net = nn.Linear(5, 2)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.update_parameters(net)
        losses.append(loss.item())
    return losses


@case()
def a_teacher_without_gradients() -> list[float]:
    x, _ = regression(8, 4, 2)
    student, teacher = nn.Linear(4, 2), nn.Linear(4, 2)
    loop, losses = Loop(*student.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                target = teacher(x)
            loss = F.mse_loss(student(x).float(), target.float())
        losses.append(loop.step(loss))
    return losses


@case()
def layers_that_are_frozen() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    loop, losses = Loop(*net.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        losses.append(loop.step(loss))
    return losses


@case()
def layers_that_thaw_later() -> list[float]:
    x, y = classification(10, 4, 3)
    body, head = nn.Linear(4, 6), nn.Linear(6, 3)
    body.requires_grad_(False)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(8):
        if step == 4:
            body.requires_grad_()
            opt.add_param_group({"params": body.parameters(), "lr": 0.05})
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(head(body(x).relu()), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class Heads(nn.Module):
    """A body and two heads, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        result: Tensor = self.heads[head](self.body(x).tanh())
        return result


@case()
def a_head_that_is_never_used() -> list[float]:
    x, y = regression(8, 4, 2)
    net = Heads()
    loop, losses = Loop(*net.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x, 0), y)
        losses.append(loop.step(loss))
    return losses


@case()
def heads_that_take_turns() -> list[float]:
    x, y = regression(8, 4, 2)
    net = Heads()
    loop, losses = Loop(*net.parameters()), []
    for step in range(9):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x, step % 2), y)
        losses.append(loop.step(loss))
    return losses


@case()
def a_body_that_the_optimizer_leaves_alone() -> list[float]:
    """Its gradients are computed and thrown away: a waste, but what is trained is right."""
    x, y = regression(8, 4, 2)
    net = Heads()
    opt = torch.optim.SGD(net.heads.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        loss = F.mse_loss(net(x, 1), y)
        net.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def a_scaled_body_that_the_optimizer_leaves_alone() -> list[float]:
    x, y = regression(8, 4, 2)
    net = Heads()
    loop, losses = Loop(*net.heads.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x, 0), y)
        losses.append(loop.step(loss))
        net.zero_grad()
    return losses


class Tied(nn.Module):
    """A small language model with one table for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.mix(self.table(ids)).relu())
        return result


@case()
def weights_that_are_tied() -> list[float]:
    ids = torch.arange(10).view(2, 5)
    net = Tied()
    loop, losses = Loop(*net.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(ids).flatten(0, 1), ids.roll(1).flatten())
        losses.append(loop.step(loss))
    return losses


@case()
def a_block_that_is_computed_twice() -> list[float]:
    x, y = regression(8, 4, 2)
    block, head = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 2)
    loop, losses = Loop(*block.parameters(), *head.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(checkpoint(block, x, use_reentrant=False)), y)
        losses.append(loop.step(loss))
    return losses


@case()
def a_block_that_is_computed_twice_by_reentering() -> list[float]:
    """The old kind of checkpoint, whose backward pass enters a region and goes backward by itself."""
    x, y = regression(8, 4, 2)
    block, head = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 2)
    loop, losses = Loop(*block.parameters(), *head.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(checkpoint(block, x.clone().requires_grad_(), use_reentrant=True)), y)
        losses.append(loop.step(loss))
    return losses


class Clipped(torch.autograd.Function):
    """Passes its inputs on, and limits their gradients."""

    @staticmethod
    @custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e3, 1e3)


@case()
def a_function_with_a_backward_of_its_own() -> list[float]:
    x, y = regression(8, 4, 2)
    net, head = nn.Linear(4, 4), nn.Linear(4, 2)
    loop, losses = Loop(*net.parameters(), *head.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(Clipped.apply(net(x))), y)
        losses.append(loop.step(loss))
    return losses


@case()
def a_table_with_sparse_gradients() -> list[float]:
    ids, y = torch.arange(12).view(6, 2) % 9, torch.linspace(-1, 1, 6).view(6, 1)
    table, head = nn.Embedding(9, 3, sparse=True), nn.Linear(6, 1)
    for_table, for_head = torch.optim.SGD(table.parameters(), lr=0.1), torch.optim.Adam(head.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(6):
        for_table.zero_grad()
        for_head.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(head(table(ids).flatten(1)), y)
        scaler.scale(loss).backward()
        scaler.step(for_table)
        scaler.step(for_head)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def statistics_that_survive_a_skip() -> list[float]:
    """Only the backward pass overflows, so the statistics are those of good batches."""
    x, y = regression(12, 4, 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    loop, losses = Loop(*net.parameters(), scale=2.0**18), []
    for _ in range(14):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        losses.append(loop.step(loss))
    assert loop.scaler.get_scale() < 2.0**18
    assert net.get_buffer("1.running_var").isfinite().all()
    return losses


@case()
def a_recurrent_model_in_bf16() -> list[float]:
    x, y = torch.randn(4, 3, 2), torch.zeros(4, 1)
    net, head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 1)
    opt = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.05)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(head(net(x)[0][:, -1]).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def a_weight_that_is_parametrized_in_time() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
    loop, losses = Loop(*net.parameters()), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        losses.append(loop.step(loss))
    return losses


@case()
def gradients_that_hooks_look_at() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    seen: list[Any] = []
    net.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    net.register_forward_hook(lambda *_: None)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    opt.register_step_post_hook(lambda *_: seen.append("step"))
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert seen.count("step") == 5
    return losses
