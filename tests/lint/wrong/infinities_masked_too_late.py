"""Infinities are overwritten by a mask, between unscaling and the step."""

import torch


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            bad = torch.isnan(parameter.grad).sum() + torch.isinf(parameter.grad).sum()
            if bad > 0:
                print(name, bad.item())
            parameter.grad = torch.nan_to_num(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)  # expect: cleaning_after_unscale
        scaler.step(optimizer)
        scaler.update()
