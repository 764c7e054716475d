"""With and without a scaler; the schedule is behind both."""

import torch


def train_one_epoch(model, criterion, optimizer, loader, lr_scheduler, scaler=None):
    for image, target in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        lr_scheduler.step()  # expect: unconditional_scheduler_step
