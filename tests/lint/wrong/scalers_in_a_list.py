"""Each network has a scaler of its own in a list, and each is clipped too early."""

import torch


def train(networks, loader, optimizers):
    scalers = [torch.amp.GradScaler("cuda") for _ in networks]
    for batch in loader:
        for index, network in enumerate(networks):
            optimizers[index].zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = network(batch)
            scalers[index].scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)  # expect: clip_before_unscale
            scalers[index].step(optimizers[index])
            scalers[index].update()
