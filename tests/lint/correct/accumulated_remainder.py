"""What is left of a window at the end of an epoch is stepped behind the loop."""

import torch


def train_epoch(model, optimizer, scaler, loader, window=4):
    optimizer.zero_grad()
    waiting = 0
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / window
        scaler.scale(loss).backward()
        waiting += 1
        if waiting == window:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            waiting = 0
    if waiting:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
