"""Gradients are kept as tensors, and filled with zeros."""

import torch


def zero(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def train(model, loader, optimizer):
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        zero(parameters)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
