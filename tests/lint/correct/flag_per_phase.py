"""Warm-up in fp32, then fp16: two loops in one function, each by its own rules."""

import torch


def train(model, warm_up, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in warm_up:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
