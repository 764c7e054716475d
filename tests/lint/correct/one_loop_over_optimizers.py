"""Any number of optimizers is stepped in a loop, and the scaler updated behind it."""

import torch


class Group:
    def __init__(self, networks):
        self.networks = networks
        self.optimizers = [torch.optim.Adam(network.parameters(), lr=1e-4) for network in networks]
        self.scaler = torch.amp.GradScaler("cuda")

    def train_batch(self, batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = sum(network(batch).square().mean() for network in self.networks)
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()
