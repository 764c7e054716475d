"""A batch that does not fit is left out, with whatever it left behind."""

import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        scaler.step(optimizer)
        scaler.update()
