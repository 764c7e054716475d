"""A second pass by way of a closure, which the scaler knows nothing of."""

import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")

    def loss_of(inputs, targets):
        with torch.autocast("cuda", dtype=torch.float16):
            return torch.nn.functional.cross_entropy(model(inputs), targets)

    for inputs, targets in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(inputs, targets)).backward()
        scaler.step(optimizer, lambda: loss_of(inputs, targets))  # expect: closure_with_scaler
        scaler.update()
