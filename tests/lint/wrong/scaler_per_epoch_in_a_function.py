"""The function that trains an epoch makes the scaler, and is called for each epoch."""

import torch


def train_epoch(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")  # expect: scaler_created_in_loop
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(20):
        train_epoch(model, loader, optimizer)
