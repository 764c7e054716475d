"""An optimizer and its scaler in one object, with and without fp16."""

import contextlib

import torch


class OptimWrapper:
    def __init__(self, optimizer, clip=None):
        self.optimizer, self.clip = optimizer, clip

    def region(self):
        return contextlib.nullcontext()

    def update_params(self, loss):
        self.backward(loss)
        self.step()
        self.optimizer.zero_grad()

    def backward(self, loss):
        loss.backward()

    def parameters(self):
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self):
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        self.optimizer.step()


class AmpOptimWrapper(OptimWrapper):
    def __init__(self, optimizer, clip=None):
        super().__init__(optimizer, clip)
        self.scaler = torch.amp.GradScaler("cuda")

    def region(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
