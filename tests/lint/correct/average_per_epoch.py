"""The average of the weights takes in one model an epoch."""

import torch
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def train(model, loader, epochs=20, begin=15):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if epoch >= begin:
            average.update_parameters(model)
            swa_scheduler.step()
    update_bn(loader, average)
