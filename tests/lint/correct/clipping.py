"""Gradients are clipped once they are unscaled."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


def train(model, loader, max_norm=1.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for batch, target in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(batch), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), max_norm)
        print("norm", norm)
        scaler.step(optimizer)
        scaler.update()
