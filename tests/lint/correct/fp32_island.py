"""A part of a model runs in fp32 inside a region."""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, inputs):
        hidden = self.project(inputs)
        with torch.autocast("cuda", enabled=False):
            return torch.log1p(self.out(hidden.float()).exp())


def train(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for inputs in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(inputs).mean()
            with torch.autocast("cuda", enabled=False):
                loss = loss.float() + 1e-4 * sum(parameter.square().sum() for parameter in model.parameters())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
