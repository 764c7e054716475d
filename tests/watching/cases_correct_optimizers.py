"""Correct loops: several optimizers, models and scalers, closures, and gradients of gradients."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from halfstep import LossScaler
from tests.watching.case import case
from tests.watching.data import classification, regression


class Pair(NamedTuple):
    """A generator that moves a point, a critic of points, and their optimizers."""

    generator: nn.Module
    critic: nn.Module
    for_generator: torch.optim.Optimizer
    for_critic: torch.optim.Optimizer


def pair() -> Pair:
    generator, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(0.1), nn.Linear(6, 1))
    return Pair(generator, critic, torch.optim.Adam(generator.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=0.02))


@case()
def two_adversaries_and_one_scaler() -> list[float]:
    real = regression(8, 3, 1)[0] + 2.0
    generator, critic, for_generator, for_critic = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(8):
        noise = torch.randn(8, 2)
        for_critic.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            fake = generator(noise)
            on_real, on_fake = critic(real).float(), critic(fake.detach()).float()
            loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        scaler.scale(loss).backward()
        scaler.step(for_critic)
        for_generator.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            deceit = F.softplus(-critic(fake).float()).mean()
        scaler.scale(deceit).backward()
        scaler.step(for_generator)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def two_adversaries_and_two_scalers() -> list[float]:
    real = regression(8, 3, 1)[0] + 2.0
    generator, critic, for_generator, for_critic = pair()
    of_generator, of_critic = torch.amp.GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(8):
        noise = torch.randn(8, 2)
        for_critic.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.softplus(-critic(real).float()).mean() + F.softplus(critic(generator(noise).detach()).float()).mean()
        of_critic.scale(loss).backward()
        of_critic.step(for_critic)
        of_critic.update()
        for_generator.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            deceit = F.softplus(-critic(generator(noise)).float()).mean()
        of_generator.scale(deceit).backward()
        of_generator.step(for_generator)
        of_generator.update()
        losses.append(loss.item())
    return losses


@case()
def updates_after_each_adversary() -> list[float]:
    real = regression(8, 3, 1)[0] + 2.0
    generator, critic, for_generator, for_critic = pair()
    scaler = LossScaler("cpu", init_scale=128.0, growth_interval=3)
    losses = []
    for step in range(9):
        noise = torch.randn(8, 2)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.softplus(-critic(real).float()).mean() + F.softplus(critic(generator(noise).detach()).float()).mean()
        for_critic.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(for_critic)
        scaler.update()
        losses.append(loss.item())
        if step % 2:
            with torch.autocast("cpu", dtype=torch.float16):
                deceit = F.softplus(-critic(generator(noise)).float()).mean()
            for_generator.zero_grad()
            scaler.scale(deceit).backward()
            scaler.step(for_generator)
            scaler.update()
    return losses


@case()
def one_loss_for_two_optimizers() -> list[float]:
    x, y = classification(10, 5, 3)
    body, head = nn.Linear(5, 6), nn.Linear(6, 3)
    slow, fast = torch.optim.SGD(body.parameters(), lr=0.05), torch.optim.AdamW(head.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(6):
        for opt in (slow, fast):
            opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(head(body(x).relu()), y)
        scaler.scale(loss).backward()
        for opt in (slow, fast):
            scaler.unscale_(opt)
        clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
        for opt in (slow, fast):
            scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def groups_with_rates_of_their_own() -> list[float]:
    x, y = regression(8, 4, 2)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    decayed = {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.01}
    opt = torch.optim.AdamW([decayed, {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.005}], lr=0.02, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def clips_before_a_fused_step() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    losses = []
    for _ in range(14):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x).float() * 4.0, y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


def by_closure(dtype: torch.dtype, *, enabled: bool) -> list[float]:
    x, y = regression(12, 3, 1)
    net = nn.Linear(3, 1)
    opt = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=4)
    losses = []

    def closure() -> float:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = F.mse_loss(net(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss.item()

    for _ in range(3):
        opt.step(closure)
    return losses


@case()
def a_closure_in_fp32() -> list[float]:
    return by_closure(torch.bfloat16, enabled=False)


@case()
def a_closure_in_bf16() -> list[float]:
    return by_closure(torch.bfloat16, enabled=True)


def fit(seed: int) -> list[float]:
    """A training with everything of its own."""
    x, y = regression(8, 4, 1, seed=seed)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def trains_one_model_after_the_other() -> list[float]:
    first, second = fit(1), fit(2)
    assert second[-1] < second[0]
    return first


class Done(NamedTuple):
    """What a training that is over leaves behind, in a notebook for example."""

    net: nn.Module
    opt: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def an_earlier_training() -> tuple[Done]:
    torch.manual_seed(0)
    done = Done(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0))
    done.scaler.scale(net(torch.ones(2, 4)).mean()).backward()
    done.scaler.step(done.opt)
    done.scaler.update()
    return (done,)


@case(before=an_earlier_training)
def leaves_the_scaler_of_an_earlier_training_alone(done: Done) -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Linear(4, 1)
    net.load_state_dict(done.net.state_dict())
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case()
def trains_a_model_for_each_fold() -> list[float]:
    folds = [fit(seed) for seed in range(5)]
    return [sum(losses) for losses in zip(*folds, strict=True)]


@case()
def makes_two_scalers_and_uses_one_after_the_other() -> list[float]:
    x, y = regression(8, 4, 1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=32.0), LossScaler("cpu", init_scale=64.0)]
    losses = []
    for scaler in scalers:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        opt = torch.optim.Adam(net.parameters(), lr=0.02)
        for _ in range(4):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
    return losses


@case()
def trains_two_models_side_by_side() -> list[float]:
    x, y = classification(8, 4, 2)
    nets = [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in nets]
    losses = []
    for _ in range(5):
        total = 0.0
        for net, opt, scaler in zip(nets, optimizers, scalers, strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.item()
        losses.append(total)
    return losses


def slope(scaled: Tensor, inputs: list[Tensor], scaler: torch.amp.GradScaler) -> Tensor:
    """The norm of gradients, without the scale that they were computed with."""
    gradients = torch.autograd.grad(outputs=scaled, inputs=inputs, create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    return torch.stack([(g * inverse).square().sum() for g in gradients]).sum().sqrt()


@case()
def penalizes_the_gradient_of_its_weights() -> list[float]:
    x, y = regression(8, 4, 1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        penalty = slope(scaler.scale(loss), list(net.parameters()), scaler)
        with torch.autocast("cpu", dtype=torch.float16):
            total = loss + 0.01 * penalty
        scaler.scale(total).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def penalizes_the_gradient_of_the_inputs_of_a_critic() -> list[float]:
    real = regression(6, 3, 1)[0] + 1.0
    critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    opt = torch.optim.Adam(critic.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    losses = []
    for _ in range(8):
        opt.zero_grad()
        between = (real * 0.5).requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            distance = critic(-real).float().mean() - critic(real).float().mean()
            score = critic(between).float().sum()
        (gradient,) = torch.autograd.grad(scaler.scale(score), between, create_graph=True)
        penalty = ((gradient / scaler.get_scale()).norm(dim=1) - 1.0).square().mean()
        loss = distance + 0.1 * penalty
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@case()
def steps_one_optimizer_in_every_other_iteration() -> list[float]:
    x, y = regression(8, 4, 1)
    net, bias = nn.Linear(4, 1, bias=False), nn.Parameter(torch.zeros(1))
    often, seldom = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD([bias], lr=0.1)
    scaler = LossScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(8):
        bias.requires_grad_(step % 2 == 0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x) + bias, y)
        often.zero_grad()
        seldom.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(often)
        if step % 2 == 0:
            scaler.step(seldom)
        scaler.update()
        losses.append(loss.item())
    return losses
