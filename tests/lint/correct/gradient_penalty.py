"""A penalty on the norm of gradients: autograd.grad of the scaled loss, then unscaled by hand."""

import torch
from torch import nn


def train(model, loader, optimizer):
    criterion = nn.MSELoss()
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = criterion(model(inputs), targets)
        scaled_grads = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        grads = [grad * inverse for grad in scaled_grads]
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            norm = 0
            for grad in grads:
                norm += grad.pow(2).sum()
            loss = loss + norm.sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
