"""What the loops train on: few rows, the same in every run, and something to learn in them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["classification", "regression"]


def regression(rows: int, inputs: int, outputs: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of shape `(rows, inputs)` and targets of shape `(rows, outputs)` that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    return x, torch.tanh(x @ torch.randn(inputs, outputs, generator=generator))


def classification(rows: int, inputs: int, classes: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of shape `(rows, inputs)` and the classes of the rows, which depend on them."""
    x, scores = regression(rows, inputs, classes, seed=seed)
    return x, scores.argmax(dim=1)
