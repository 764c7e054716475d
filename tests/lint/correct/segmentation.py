"""A schedule that watches a validation score, asked now and then inside the loop over batches."""

import torch
from torch import nn


def dice_loss(probabilities, masks):
    overlap = 2 * (probabilities.float() * masks).sum()
    return 1 - (overlap + 1) / (probabilities.float().sum() + masks.sum() + 1)


def train(model, loader, evaluate, device, amp=False, every=40):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.BCEWithLogitsLoss()
    step = 0
    for images, masks in loader:
        with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
            logits = model(images).squeeze(1)
            loss = criterion(logits, masks) + dice_loss(torch.sigmoid(logits), masks)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        step += 1
        if step % every == 0:
            scheduler.step(evaluate(model, device, amp))
