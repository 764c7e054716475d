"""Whether a step was skipped is a value of its own, asked for further down."""

import torch


def train(model, loader, optimizer, lr_scheduler):
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
        optimizer.zero_grad()
        if skipped:
            continue
        lr_scheduler.step()
