"""One region around the whole run: weights are cast once, and the casts are kept."""

import torch
from torch import nn


def main(loader):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # expect: loop_inside_autocast
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "model.pt")
