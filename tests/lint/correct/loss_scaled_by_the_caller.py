"""The method that differentiates is given a loss that is scaled already."""

import torch


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def differentiate(self, loss):
        loss.backward()

    def train(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for batch in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(batch)
            self.differentiate(scaler.scale(loss))
            scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            scaler.step(self.optimizer)
            scaler.update()
