"""The step goes by the scaler, the loss does not."""

import torch
from torch import nn


def train(model, loader, epochs):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(images), labels)
            loss.backward()  # expect: unscaled_backward
            scaler.step(optimizer)
            scaler.update()
