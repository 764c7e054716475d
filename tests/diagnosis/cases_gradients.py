"""Gradients that overflow: with the loss scale alone, or at every scale down to 1."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import NOWHERE, SLOW_SGD, Case, training

__all__ = ["BACKWARD", "SCALE"]


def vectors(*, count: int = 8) -> list[Any]:
    return [(torch.randn(count, 8), torch.randn(count, 4)) for _ in range(2)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def added_up(model: Any, batch: Any) -> Tensor:
    """Each output has a gradient of 1, which the default scale makes 65536: more than fp16 holds."""
    x, _ = batch
    out: Tensor = model(x).float()  # here: gradient of one
    return out.sum()


def pixels(model: Any, batch: Any) -> Tensor:
    x, y = batch
    predicted = model(x)
    return F.l1_loss(predicted, y, reduction="sum") * 300.0  # here: sum over pixels


def pixel_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1))


def images() -> list[Any]:
    return [(torch.randn(2, 1, 6, 6), torch.randn(2, 1, 6, 6)) for _ in range(2)]


def log_likelihood(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    p = model(x).sigmoid()
    result: Tensor = -p.log().sum()
    return result


class LargeHead(nn.Module):
    """A head with weights in the hundreds, behind features near zero: the gradient of the features is large, their product is not."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 64)
        nn.init.constant_(self.head.weight, size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x * 1e-3).tanh())  # here: large head
        return result


def head_sum(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    result: Tensor = model(x).float().sum()
    return result


class Ratio(nn.Module):
    """Divides by what is near zero: the quotient is in range, and its derivative, which has the square below, is not."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = nn.Linear(8, 4), nn.Linear(8, 4)
        nn.init.normal_(self.lower.weight, std=1e-4)
        nn.init.constant_(self.lower.bias, 1.2e-3)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = self.upper(x), self.lower(x)
        result: Tensor = upper / lower  # here: small divisor
        return result


def mean_of(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    result: Tensor = model(x).float().mean() * 10.0
    return result


class Distance(nn.Module):
    """The root of a squared distance, with a guard that fp16 rounds to zero. For a pair that is the same, the root has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 4)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        apart = self.embed(first) - self.embed(second)
        result: Tensor = ((apart * apart).mean(dim=-1) + 1e-12).sqrt()  # here: guarded root
        return result


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({"pairs": Distance()})

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = self.tasks["pairs"](first, second)
        return result


def pulled_together(model: Any, batch: Any) -> Tensor:
    first, second = batch
    result: Tensor = model(first, second).float().mean()
    return result


def same_pair() -> list[Any]:
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    second[1] = first[1]
    return [(first, second)]


def heavy(model: Any, batch: Any) -> Tensor:
    """The weight of a loss that makes its gradient infinite before any layer has seen it."""
    x, y = batch
    predicted = model(x).float()  # here: heavy loss
    return F.mse_loss(predicted, y) * 1e8


SCALE = (
    Case(
        name="outputs that are added up",
        task=training(small, added_up, vectors),
        cause="scale",
        op="aten._to_copy.default",
        module=NOWHERE,
        marker="here: gradient of one",
        verified=True,
    ),
    Case(
        name="outputs that are added up, by the CPU's own autocast",
        task=training(small, added_up, vectors),
        cause="scale",
        op="aten._to_copy.default",
        module=NOWHERE,
        marker="here: gradient of one",
        verified=True,
        target=None,
    ),
    Case(
        name="a loss that is a sum over pixels, with a weight",
        task=training(pixel_net, pixels, images, optimizer=SLOW_SGD),
        cause="scale",
        op="aten._to_copy.default",
        module=NOWHERE,
        marker="here: sum over pixels",
        verified=True,
    ),
    Case(
        name="a likelihood at a scale of 2**20, which anomaly detection would blame on a layer",
        task=training(small, log_likelihood, vectors),
        cause="scale",
        verified=True,
        loss_scale=2.0**20,
    ),
    Case(
        name="a large head at a moderate scale",
        task=training(lambda: LargeHead(100.0), head_sum, vectors, optimizer=SLOW_SGD),
        cause="scale",
        op="aten.mm.default",
        module="head",
        marker="here: large head",
        verified=True,
        loss_scale=512.0,
    ),
)

BACKWARD = (
    Case(
        name="the derivative of a quotient",
        task=training(lambda: nn.Sequential(Ratio()), mean_of, vectors, optimizer=SLOW_SGD),
        cause="backward",
        op="aten.div.Tensor",
        module="0",
        marker="here: small divisor",
        verified=True,
    ),
    Case(
        name="the derivative of a quotient, by the CPU's own autocast",
        task=training(lambda: nn.Sequential(Ratio()), mean_of, vectors, optimizer=SLOW_SGD),
        cause="backward",
        op="aten.div.Tensor",
        module="0",
        marker="here: small divisor",
        target=None,
    ),
    Case(  # In fp32 the guard is there, and the derivative of the root is large and meets a zero.
        name="the root of no distance behind a guard",
        task=training(Pairs, pulled_together, same_pair),
        cause="backward",
        op="aten.div.Tensor",
        module="tasks.pairs",
        marker="here: guarded root",
        verified=True,
    ),
    Case(  # At the default scale, a cast overflows before. What overflows at every scale is the product.
        name="a very large head",
        task=training(lambda: LargeHead(3e3), head_sum, vectors, optimizer=SLOW_SGD),
        cause="backward",
        op="aten.mm.default",
        module="head",
        marker="here: large head",
    ),
    Case(
        name="a loss with a very large weight",
        task=training(small, heavy, vectors, optimizer=SLOW_SGD),
        cause="backward",
        op="aten._to_copy.default",
        module=NOWHERE,
        marker="here: heavy loss",
    ),
)
