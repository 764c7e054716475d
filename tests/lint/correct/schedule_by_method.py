"""A method of the class says whether the last step was taken."""

import torch


class Loop:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.amp.GradScaler("cuda")
        self._last_scale = self.scaler.get_scale()

    def step_was_taken(self):
        scale, self._last_scale = self._last_scale, self.scaler.get_scale()
        return self._last_scale >= scale

    def run(self, loader):
        for inputs, targets in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.step_was_taken():
                self.scheduler.step()
