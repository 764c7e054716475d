"""Whether mixed precision is on is what the method says that makes the scaler."""

import torch


class Trainer:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def train(self, loader, settings):
        settings.amp = self.prepare(settings.amp)
        for batch in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=settings.amp):
                loss = self.net(batch)
            self.step(loss)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def prepare(self, wanted):
        self.scaler = torch.amp.GradScaler("cuda", enabled=wanted)
        return wanted
