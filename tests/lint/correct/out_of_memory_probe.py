"""A forward and a backward that only find out which batch size fits: nothing is stepped."""

import torch


def fits(model, size, shape):
    inputs = torch.randn(size, *shape, device="cuda")
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(inputs).sum()
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True


def train(model, make_loader, shape):
    size = 1024
    while size > 1 and not fits(model, size, shape):
        size //= 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in make_loader(size):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
