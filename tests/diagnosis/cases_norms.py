"""An overflow that no NaN shows: what comes after divides by it, and the result is zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import Case, training

__all__ = ["HIDDEN"]


class RootMeanSquare(nn.Module):
    """A norm by hand: the square of what is above 256 is infinite in fp16, and the root's reciprocal is then zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        squares = (x * x).mean(dim=-1, keepdim=True)  # here: squares by a product
        return x * torch.rsqrt(squares + 1e-5) * self.gain


class RootMeanPower(nn.Module):
    """The same by a power, which CUDA's autocast computes in fp32 and a CPU's does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        squares = x.pow(2).mean(-1, keepdim=True)  # here: squares by a power
        return x * (squares + 1e-5).rsqrt() * self.gain


class ChannelNorm(nn.Module):
    """Divides the channels of an image by their energy at each place."""

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.linalg.vecdot(x, x, dim=1).unsqueeze(1)  # here: energy
        result: Tensor = x / energy.sqrt()
        return result


class Distances(nn.Module):
    """Similarities that fall with the square of the distance, as t-SNE has them."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.mix = nn.Linear(8, 4), nn.Linear(4, 1)
        nn.init.normal_(self.points.weight, std=400.0)

    def forward(self, x: Tensor) -> Tensor:
        points = self.points(x)
        apart = points[:, None] - points[None]
        near = 1e6 / (1e6 + apart * apart)  # here: squared differences
        result: Tensor = self.mix(near.mean(dim=1))
        return result


def wide(norm: nn.Module, width: int = 8) -> nn.Module:
    """A norm behind a layer whose results are in the hundreds or more."""
    first = nn.Linear(8, width)
    nn.init.normal_(first.weight, std=400.0)
    return nn.Sequential(first, nn.ModuleDict({"norm": norm})["norm"], nn.Linear(width, 1))


class Block(nn.Module):
    """The norm is two modules down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"project": nn.Linear(8, 8), "norm": RootMeanSquare(8)})
        nn.init.normal_(self.layers.get_parameter("project.weight"), std=400.0)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layers["norm"](self.layers["project"](x))
        result: Tensor = self.head(normed)
        return result


def bright() -> nn.Module:
    first = nn.Conv2d(1, 4, 1)
    nn.init.normal_(first.weight, std=500.0)
    return nn.Sequential(first, ChannelNorm(), nn.Flatten(), nn.Linear(64, 1))


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def vectors() -> list[Any]:
    return [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(2)]


def images() -> list[Any]:
    return [(1.0 + torch.rand(3, 1, 4, 4), torch.randn(3, 1)) for _ in range(2)]


HIDDEN = (
    Case(
        name="a root mean square by products, two modules down",
        task=training(Block, regression, vectors),
        cause="forward",
        op="aten.mul.Tensor",
        module="layers.norm",
        marker="here: squares by a product",
        verified=True,
        loss_scale=64.0,
    ),
    Case(
        name="a root mean square by powers, by the CPU's own autocast",
        task=training(lambda: wide(RootMeanPower(8)), regression, vectors),
        cause="forward",
        op="aten.pow.Tensor_Scalar",
        module="1",
        marker="here: squares by a power",
        verified=True,
        loss_scale=64.0,
        target=None,
    ),
    Case(
        name="the energy of channels",
        task=training(bright, regression, images),
        cause="forward",
        op="aten.mul.Tensor",
        module="1",
        marker="here: energy",
        verified=True,
        loss_scale=64.0,
    ),
    Case(
        name="squared differences, whose reciprocals are zero",
        task=training(lambda: nn.Sequential(Distances()), regression, vectors),
        cause="forward",
        op="aten.mul.Tensor",
        module="0",
        marker="here: squared differences",
        verified=True,
        loss_scale=64.0,
    ),
)
