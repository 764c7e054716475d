"""Correct loops: precisions, regions, and what is switched off."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


@case()
def plain_fp32() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def plain_bf16() -> list[float]:
    x, y = classification(12, 5, 3)
    net = nn.Linear(5, 3)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses, norms = [], []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        norms.append(sum(float(p.grad.norm()) for p in net.parameters() if p.grad is not None))
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def plain_fp16() -> list[float]:
    x, y = regression(8, 6, 2)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def starts_with_skips_at_the_default_scale() -> list[float]:
    x, y = regression(6, 4, 3)
    net = nn.Linear(4, 3)
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(15):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (net(x).float() - y).square().sum()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() < 65536.0
    return losses


@case(ignores=("`torch.cpu.amp",))
def names_of_an_older_torch() -> list[float]:
    x, y = classification(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = torch.cpu.amp.GradScaler(init_scale=64.0)  # type: ignore[attr-defined]
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with torch.cpu.amp.autocast(dtype=torch.float16):  # type: ignore[attr-defined]
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def clips_and_measures_after_unscaling() -> list[float]:
    x, y = regression(10, 5, 1)
    net = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 1))
    opt = torch.optim.RMSprop(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses, norms = [], []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(clip_grad_norm_(net.parameters(), 0.5).item())
        norms.append(sum(p.grad.square().sum().item() for p in net.parameters() if p.grad is not None))
        nn.utils.clip_grad_value_(net.parameters(), 0.2)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


def maybe_half(enabled: bool) -> list[float]:
    x, y = regression(8, 3, 2)
    net = nn.Linear(3, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def a_switch_that_is_off() -> list[float]:
    return maybe_half(enabled=False)


@case()
def a_switch_that_is_on() -> list[float]:
    return maybe_half(enabled=True)


@case()
def a_scaler_that_bf16_switches_off() -> list[float]:
    x, y = classification(8, 4, 2)
    net, dtype = nn.Linear(4, 2), torch.bfloat16
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def a_region_of_cuda_that_is_off() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", enabled=False):
            loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def evaluates_in_fp16_between_steps_in_fp32() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, scores = [], []
    for _ in range(6):
        net.train()
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            scores += [F.mse_loss(net(x), y).item() for _ in range(2)]
    return losses


@case()
def features_of_a_frozen_fp16_backbone() -> list[float]:
    x, y = classification(10, 6, 2)
    backbone, head = nn.Linear(6, 8), nn.Linear(8, 2)
    opt = torch.optim.SGD(head.parameters(), lr=0.3)
    losses = []
    for _ in range(6):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            features = backbone(x).relu()
        loss = F.cross_entropy(head(features.float().clone()), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def a_backbone_in_fp16_whose_weights_need_no_gradient() -> list[float]:
    x, y = regression(10, 5, 1)
    backbone, head = nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 1)
    opt = torch.optim.Adam(head.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.float16):
            features = backbone(x).relu()
        loss = F.mse_loss(head(features.float()), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def a_scaler_round_fp32() -> list[float]:
    x, y = regression(6, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    losses = []
    for _ in range(12):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class Islands(nn.Module):
    """A model with regions within regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = self.norm(hidden.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = hidden + self.last.weight * 0.1
        return self.last(hidden.relu())


@case()
def islands_of_fp32() -> list[float]:
    x, y = regression(8, 4, 1)
    net = Islands()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = LossScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = net(x)
            with torch.autocast("cpu", enabled=False):
                loss = F.mse_loss(prediction.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


class EachLayer(nn.Module):
    """A model that enters a region for each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.autocast("cpu", dtype=torch.float16):
                x = layer(x)
            x = x.float().tanh()
        return x


@case()
def a_region_for_each_layer() -> list[float]:
    x, y = regression(8, 4, 2)
    net = EachLayer()
    opt = torch.optim.AdamW(net.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(8):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


class Decorated(nn.Module):
    """A model whose forward is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 5), nn.SiLU(), nn.Linear(5, 3))

    @torch.autocast("cpu", dtype=torch.float16)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@case()
def a_forward_that_is_decorated() -> list[float]:
    x, y = classification(9, 5, 3)
    net = Decorated()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        net.zero_grad()
        losses.append(loss.item())
    return losses


@case()
def many_predictions_in_one_region() -> list[float]:
    x, y = regression(12, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        errors = [F.mse_loss(net(xs), ys).item() for xs, ys in zip(x.split(3), y.split(3), strict=True)]
    assert len(errors) == 4
    return losses


@case()
def limits_scaled_gradients_by_a_scaled_limit() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0 * scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses
