"""Each fold has a new model, optimizer and scaler, by methods that a loop calls."""

import torch


class Folds:
    def __init__(self, make, folds):
        self.make, self.folds = make, folds

    def begin(self):
        self.model = self.make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare(self):
        torch.manual_seed(0)
        self.begin()

    def run(self):
        for loader in self.folds:
            self.prepare()
            self.fit(loader)

    def fit(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for inputs, targets in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
