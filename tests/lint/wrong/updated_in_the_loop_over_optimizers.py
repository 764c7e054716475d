"""One backward pass for several optimizers, and an update behind each of them."""

import torch


def train(model, loader, optimizers):
    grad_scale = torch.amp.GradScaler("cuda")
    for batch in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        grad_scale.scale(loss).backward()
        for optimizer in optimizers:
            grad_scale.step(optimizer)
            grad_scale.update()  # expect: repeated_update
