"""A model over two GPUs in each process: forward enters the region itself."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Split(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.front = nn.Linear(32, 32).to(first)
        self.back = nn.Linear(32, 10).to(second)

    def forward(self, inputs):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.back(self.front(inputs.to(self.first)).to(self.second))


def train(loader, first, second):
    model = DistributedDataParallel(Split(first, second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(inputs), targets.to(second))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
