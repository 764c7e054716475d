"""Two models, two losses and two optimizers share one scaler, which is updated once."""

import torch

from library import build, losses


def train(loader, device="cuda"):
    first, second = build(device), build(device)
    first_optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    second_optimizer = torch.optim.Adam(second.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            one = first(inputs)
            two = second(inputs)
            first_loss = losses.distance(2 * one + 3 * two, targets)
            second_loss = losses.distance(3 * one - 5 * two, targets)
        scaler.scale(first_loss).backward(retain_graph=True)
        scaler.scale(second_loss).backward()
        scaler.unscale_(first_optimizer)
        torch.nn.utils.clip_grad_norm_(first.parameters(), 5.0)
        scaler.step(first_optimizer)
        scaler.step(second_optimizer)
        scaler.update()
