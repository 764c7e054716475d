"""An optimizer that climbs first and steps then, and drops the gradients in both; it divides by the scale that it is given."""

import torch


def train(model, loader, make_optimizer):
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.first_step(zero_grad=True)
        scaler.update()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.second_step(zero_grad=True)
        scaler.update()
