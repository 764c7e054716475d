"""Unscaled for clipping, or else for looking: the norm tells which it was."""

import torch


class Trainer:
    def __init__(self, model, optimizer, limit=None, watch=False):
        self.model, self.optimizer = model, optimizer
        self.limit, self.watch = limit, watch
        self.scaler = torch.amp.GradScaler("cuda")

    def norm_of_gradients(self):
        norm = None
        if self.limit is not None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        if self.watch:
            if norm is None:
                self.scaler.unscale_(self.optimizer)
                norm = torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm()
            norm = norm.item()
        return norm

    def fit(self, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(batch)
            self.scaler.scale(loss).backward()
            self.norm_of_gradients()
            self.scaler.step(self.optimizer)
            self.scaler.update()
