"""A schedule by epochs, with the loop over batches in another method."""

import torch


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=30)
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, epochs):
        for _ in range(epochs):
            self.train_epoch()
            self.scheduler.step()

    def train_epoch(self):
        for inputs, targets in self.loader:
            self.train_batch(inputs, targets)

    def train_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
