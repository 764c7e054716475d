"""Many GPUs in one process: the region is entered inside forward, in each thread."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.body(inputs)


def train(loader):
    model = nn.DataParallel(Network().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
