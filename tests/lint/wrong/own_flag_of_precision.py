"""Both branches of a flag, and the mistake is in one of them."""

import torch


def train(model, loader, fp16=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda") if fp16 else None
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        if fp16:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip_before_unscale
        if fp16:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
