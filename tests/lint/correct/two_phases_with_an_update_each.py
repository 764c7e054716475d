"""Two phases, each with a backward pass of its own behind the other one's update: each divides by the scale that it multiplied by."""

import torch


def train(generator, critic, loader, first, second):
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        second.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = critic(real) - critic(generator(real).detach())
        scaler.scale(loss).backward()
        scaler.step(second)
        scaler.update()

        first.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -critic(generator(real))
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.update()
