"""A batch with a bad loss is left out, and the update that belongs to a step is called all the same."""

import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        if not torch.isfinite(loss):
            scaler.update()  # expect: repeated_update
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
