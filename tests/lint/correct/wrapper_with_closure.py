"""A wrapper of an optimizer passes on what it is given, which nobody gives."""

import torch


class ScaledOptimizer:
    def __init__(self, optimizer, scaler=None):
        self.optimizer = optimizer
        self.scaler = scaler or torch.amp.GradScaler("cuda")

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure=None):
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
