"""Forward, backward, the step and the log in one region, behind a flag."""

import torch


class Engine:
    def __init__(self, model, config):
        self.model, self.config = model, config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config.steps)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.amp)
        self.history = []

    def train_step(self, inputs, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.amp):
            logits = self.model(inputs)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            self.scaler.scale(loss).backward()  # expect: backward_in_autocast
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.config.log:
                self.history.append(loss.item())
        return loss

    def fit(self, loader):
        for epoch in range(self.config.epochs):
            for inputs, targets in loader:
                self.train_step(inputs, targets)
                self.scheduler.step()  # expect: unconditional_scheduler_step
