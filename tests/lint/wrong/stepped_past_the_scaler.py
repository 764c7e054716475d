"""The loss is scaled, the optimizer does not know."""

import torch
from torch import nn, optim


def train(loader, device):
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(device)
    opt = optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for epoch in range(3):
        running = torch.zeros((), device=device)
        for images, labels in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(images), labels)
            scaler.scale(loss).backward()
            opt.step()  # expect: optimizer_step_bypasses_scaler
            running += loss.detach()
        print(epoch, running.item() / len(loader))
