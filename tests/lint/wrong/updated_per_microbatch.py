"""The norm of each micro-batch is wanted, and so everything is unscaled and updated in between."""

import torch


def train(model, loader, window=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda", growth_interval=100)
    norms = []
    for index, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean() / window
        scaler.scale(loss).backward()
        if (index + 1) % window != 0:
            scaler.unscale_(optimizer)
            norms.append(model.weight.grad.norm())
            scaler.update()  # expect: repeated_update
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norms
