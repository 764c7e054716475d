"""A model of single operations, and versions of it with casts written around some of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Mixer", "by_hand"]


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


class Mixer(nn.Module):
    """One of each: operations that autocast lowers, those that it raises, and those that it leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.linear(self.first, inputs)
        joined = self.add(self.softmax(hidden), hidden)
        hidden = self.gelu(self.linear(self.second, joined))
        again = self.linear(self.second, hidden)
        return self.layer_norm(again)

    def linear(self, layer: nn.Linear, values: Tensor) -> Tensor:
        result: Tensor = layer(values)
        return result

    def softmax(self, values: Tensor) -> Tensor:
        return torch.softmax(values, -1)

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def gelu(self, values: Tensor) -> Tensor:
        return F.gelu(values)

    def layer_norm(self, values: Tensor) -> Tensor:
        result: Tensor = self.norm(values)
        return result


def by_hand(dtype: torch.dtype, *names: str) -> type[Mixer]:
    """The same model with casts written around some of its operations."""

    class Written(Mixer):
        def linear(self, layer: nn.Linear, values: Tensor) -> Tensor:
            if "linear" not in names:
                return super().linear(layer, values)
            with off():
                return F.linear(values.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))

        def softmax(self, values: Tensor) -> Tensor:
            if "softmax" not in names:
                return super().softmax(values)
            with off():
                return torch.softmax(values.to(dtype), -1)

        def add(self, left: Tensor, right: Tensor) -> Tensor:
            if "add" not in names:
                return super().add(left, right)
            return left.to(dtype) + right.to(dtype)

        def gelu(self, values: Tensor) -> Tensor:
            return super().gelu(values.to(dtype) if "gelu" in names else values)

        def layer_norm(self, values: Tensor) -> Tensor:
            if "layer_norm" not in names:
                return super().layer_norm(values)
            with off():
                return F.layer_norm(values.to(dtype), (6,), self.norm.weight.to(dtype), self.norm.bias.to(dtype))

    return Written
