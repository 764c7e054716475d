"""Norms are read where they mean something: behind `unscale_`."""

import torch


def gradient_norm(model):
    squares = [parameter.grad.float().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(squares).sum().sqrt()


def train(model, loader, optimizer, writer):
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        writer.add_scalar("norm", gradient_norm(model), index)
        writer.add_scalar("first", model.first.weight.grad.norm(), index)
        scaler.step(optimizer)
        scaler.update()
