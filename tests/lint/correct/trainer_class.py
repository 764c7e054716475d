"""The moments of a step are methods of a class."""

import torch


class Trainer:
    def __init__(self, model, optimizer, config):
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.amp)
        self.updates = 0

    def forward_loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.amp):
            return self.model(**batch).loss / self.config.accumulate

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def train(self, loader):
        self.model.train()
        for index, batch in enumerate(loader, start=1):
            self.backward(self.forward_loss(batch))
            if index % self.config.accumulate == 0:
                self.clip()
                self.step()

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["scaler"] = self.scaler.state_dict()
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
