"""Unscaled and clipped once a window, at the last micro-batch of an epoch too."""

import torch
from torch import nn


def train_epoch(model, optimizer, scaler, loader, window):
    model.train()
    optimizer.zero_grad()
    for index, (tokens, labels) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss / window
        scaler.scale(loss).backward()
        is_last = index + 1 == len(loader)
        if (index + 1) % window == 0 or is_last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        train_epoch(model, optimizer, scaler, loader, window=8)
