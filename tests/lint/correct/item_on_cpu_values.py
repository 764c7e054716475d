"""`.item()` on what lies on the host, or now and then, costs nothing."""

import numpy as np
import torch


def train(model, loader, optimizer, log_every=100):
    scaler = torch.amp.GradScaler("cuda")
    weights = np.linspace(0.0, 1.0, 11)
    for index, (inputs, targets) in enumerate(loader):
        share = weights[index % 11].item()
        count = torch.tensor([len(inputs)]).item()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = share * torch.nn.functional.cross_entropy(model(inputs), targets) / count
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if index % log_every == 0:
            print(f"loss {loss.item():.4f} scale {scaler.get_scale():g}")
