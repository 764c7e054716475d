"""The scaler comes from elsewhere, and the step is spread over functions."""

import torch
from torch.nn.utils import clip_grad_norm_


def backward(loss, scaler):
    scaler.scale(loss).backward()


def finish(model, optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


def train(model, loader, optimizer, scaler: torch.amp.GradScaler, window=2, max_norm=1.0):
    for index, (inputs, targets) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / window
        backward(loss, scaler)
        if index % window == window - 1:
            finish(model, optimizer, scaler, max_norm)
