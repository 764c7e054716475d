"""Optimizers and schedules are kept in dictionaries; schedules count epochs."""

import torch


class Experiment:
    def __init__(self, networks, config):
        self.networks = networks
        self.optimizers = {name: torch.optim.Adam(network.parameters(), lr=config.lr) for name, network in networks.items()}
        self.schedulers = {name: torch.optim.lr_scheduler.StepLR(one, 10) for name, one in self.optimizers.items()}
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.amp)
        self.config = config

    def run(self, loader):
        for _ in range(self.config.epochs):
            for batch in loader:
                self.run_batch(batch)
            for scheduler in self.schedulers.values():
                scheduler.step()

    def run_batch(self, batch):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.amp):
            loss = sum(network(batch).square().mean() for network in self.networks.values())
        self.scaler.scale(loss).backward()
        for name, optimizer in self.optimizers.items():
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.networks[name].parameters(), 1.0)
            self.scaler.step(optimizer)
        self.scaler.update()
