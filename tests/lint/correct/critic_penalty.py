"""The interpolation penalty of a critic: autograd.grad inside a region is part of the forward pass."""

import torch


def penalty(critic, real, fake):
    mix = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    points = (mix * real + (1 - mix) * fake).requires_grad_()
    scores = critic(points)
    (grads,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    return (grads.float().flatten(1).norm(dim=1) - 1).square().mean()


def train_critic(critic, generator, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = generator(torch.randn(real.size(0), 64, device=real.device)).detach()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
