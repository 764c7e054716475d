"""A batch with a large norm is left out, and the scaler is not told."""

import torch


def train(model, loader, limit=50.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    left_out = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if norm > limit:
            left_out += 1
            continue  # expect: missing_update
        scaler.step(optimizer)
        scaler.update()
    return left_out
