"""Stepped and updated each time, but gradients are dropped in every fourth iteration only."""

import torch


def train(model, loader, window=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader):
        if index % window == 0:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()  # expect: gradients_kept_across_update
