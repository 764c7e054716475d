"""Tiny tasks whose casts can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.task import Task, TaskFactory

__all__ = ["Shared", "encoder", "factory", "islands", "softmaxes", "square"]


def square(model: Any, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def factory(model: Callable[[], nn.Module], *, loss: Callable[[Any, Tensor], Tensor] = square) -> TaskFactory:
    """Tasks with a batch of 2 x 5 x 8 numbers."""

    def task(seed: int) -> Task:
        made = model()
        return Task(model=made, optimizer=torch.optim.SGD(made.parameters(), lr=0.1), loss=loss, batches=[torch.randn(2, 5, 8)])

    return task


def islands() -> nn.Module:
    """Two layers around two activations, which have no weights."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 8))


def softmaxes() -> nn.Module:
    """One operation in three modules."""
    return nn.Sequential(nn.Softmax(-1), nn.Softmax(-1), nn.Softmax(-1), nn.Linear(8, 8))


class Block(nn.Module):
    """A Transformer's block, written so that each of its parts is a module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        out: Tensor = x + self.mlp(x)
        return out


def encoder() -> nn.Module:
    return nn.Sequential(Block(), Block())


class Shared(nn.Module):
    """One layer that two containers hold, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.a, self.b = nn.Sequential(layer, nn.ReLU()), nn.Sequential(layer, nn.ReLU())
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.b(self.a(x)))
        return out
