"""Unscaled, clipped and stepped in three loops over the same optimizers, and updated once behind them."""

import torch


class Learner:
    def __init__(self, modules, optimizers):
        self.modules = modules
        self.optimizers = optimizers
        self.scaler = torch.amp.GradScaler("cuda")

    def fit_batch(self, batch, last_of_window):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.modules(batch)
        self.scaler.scale(loss).backward()
        if last_of_window:
            self.step_all()

    def step_all(self):
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        for group in self.optimizers:
            torch.nn.utils.clip_grad_norm_(self.modules[group].parameters(), 5.0)
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def fit(self, loader, window=4):
        for index, batch in enumerate(loader, start=1):
            self.fit_batch(batch, index % window == 0)
