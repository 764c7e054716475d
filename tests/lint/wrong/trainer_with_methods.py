"""The step is spread over methods, and their order is wrong."""

import torch


class Trainer:
    def __init__(self, model, loader, accumulate=4):
        self.model = model
        self.loader = loader
        self.accumulate = accumulate
        self.opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.model(batch) / self.accumulate

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # expect: clip_before_unscale

    def optimizer_step(self):
        self.clip()
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def fit(self):
        for index, batch in enumerate(self.loader):
            self.scaler.scale(self.loss(batch)).backward()
            if (index + 1) % self.accumulate == 0:
                self.optimizer_step()
