"""Each epoch has a scaler of its own, in a method."""

import torch


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(self, epochs):
        for epoch in range(epochs):
            mean = self._train_epoch(epoch)
            print(epoch, mean)

    def _train_epoch(self, epoch):
        self.model.train()
        scaler = torch.amp.GradScaler("cuda")  # expect: scaler_created_in_loop
        total = torch.zeros((), device="cuda")
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            total += loss.detach()
        return total / len(self.loader)
