"""A small SAM, sharpness-aware minimization, written as its common implementation is: what the engine has to drive by a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SAM"]


class SAM(torch.optim.Optimizer):
    """Goes uphill by `rho`, computes gradients there by a closure, comes back and steps with these.

    Source: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021.
    """

    def __init__(self, parameters: Any, base: Callable[[Any], torch.optim.Optimizer], *, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["before"] = each.clone()
            each.add_(each.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        closure()  # Without gradients switched on: that is the closure's part.
        for each in parameters:
            each.copy_(self.state[each]["before"])
        self.base_optimizer.step()


class DemandingSAM(SAM):
    """One whose `step` cannot be called without its closure, as that of LBFGS cannot."""

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        super().step(closure)
