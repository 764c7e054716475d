"""Unscaled once for the log, and again for clipping."""

import torch


def norm_of(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def train(model, loader, writer, max_norm):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        writer.add_scalar("norm", norm_of(model), step)
        if max_norm:
            scaler.unscale_(optimizer)  # expect: repeated_unscale
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
