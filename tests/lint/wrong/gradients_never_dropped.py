"""No gradient is ever dropped."""

import torch


def train(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.smooth_l1_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # expect: missing_zero_grad
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses)
