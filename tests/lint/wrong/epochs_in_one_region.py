"""The region is entered once for all epochs, as a decorator."""

import torch


class Fit:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    @torch.autocast("cuda", dtype=torch.float16)  # expect: loop_inside_autocast
    def run(self, loader, epochs):
        for epoch in range(epochs):
            for inputs, targets in loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
