"""A batch that is left out is forgotten by the scaler, not by the gradients."""

import math

import torch


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            scaler.update()
            print("left out")
            continue  # expect: missing_zero_grad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
