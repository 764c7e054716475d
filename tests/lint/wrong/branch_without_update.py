"""A batch with a bad norm is left out by a branch, and the update with it."""

import torch


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(total):  # expect: missing_update
            optimizer.zero_grad()
        else:
            scaler.step(optimizer)
            scaler.update()
