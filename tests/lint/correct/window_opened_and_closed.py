"""Gradients are dropped where a window begins, and stepped where it ends."""

import torch


def train(model, loader, optimizer, window):
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader):
        begins, ends = index % window == 0, (index + 1) % window == 0
        if begins:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / window
        scaler.scale(loss).backward()
        if ends:
            scaler.step(optimizer)
            scaler.update()
