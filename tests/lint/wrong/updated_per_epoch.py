"""The update has slipped out of the loop over batches."""

import torch


def train(model, loader, optimizer, epochs):
    scaler = torch.amp.GradScaler("cuda")
    for _epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # expect: missing_update
        scaler.update()
