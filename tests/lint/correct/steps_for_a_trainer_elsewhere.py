"""A collection of optimizers that a trainer in another file drives, which updates the scaler when all have stepped."""

import torch


class Optimizers:
    def __init__(self, optimizers, limits):
        self.optimizers = optimizers
        self.limits = limits

    def step_all(self, scaler: torch.amp.GradScaler) -> None:
        for name, optimizer in self.optimizers.items():
            if self.limits[name] is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.limits[name])
            scaler.step(optimizer)

    def zero_all(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
