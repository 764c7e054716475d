"""What stays finite and teaches nothing: gradients of zero, and updates that change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import Case, training

__all__ = ["UNDERFLOW", "UPDATE"]


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def vectors(*, count: int = 6) -> list[Any]:
    return [(torch.randn(count, 4), torch.randn(count, 2)) for _ in range(2)]


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def faint(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    result: Tensor = (model(x).float() * 1e-3).square().mean()
    return result


def plain_vectors() -> list[Any]:
    return [(torch.randn(16, 16), None) for _ in range(2)]


def fine_pixels(model: Any, batch: Any) -> Tensor:
    """A mean over many pixels: the gradient of each is small before any layer has seen it."""
    x, y = batch
    return F.mse_loss(model(x), y) * 1e-5


def pixel_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1))


def pixel_batches() -> list[Any]:
    return [(torch.randn(2, 1, 64, 64), torch.randn(2, 1, 64, 64)) for _ in range(2)]


class Branches(nn.Module):
    """Two heads, of which one is weighted so low that what is behind it learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"main": nn.Linear(16, 4), "auxiliary": nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads["main"](x), self.heads["auxiliary"](x)


def weighted(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    main, auxiliary = model(x)
    result: Tensor = main.float().square().mean() + 1e-6 * auxiliary.float().square().mean()
    return result


UNDERFLOW = (
    Case(
        name="a faint loss without loss scaling",
        task=training(two_layers, faint, plain_vectors),
        cause="underflow",
        verified=True,
        loss_scale=1.0,
    ),
    Case(
        name="a faint loss without loss scaling, by the CPU's own autocast",
        task=training(two_layers, faint, plain_vectors),
        cause="underflow",
        verified=True,
        target=None,
        loss_scale=1.0,
    ),
    Case(
        name="a mean over many pixels without loss scaling",
        task=training(pixel_net, fine_pixels, pixel_batches),
        cause="underflow",
        verified=True,
        loss_scale=1.0,
    ),
    Case(
        name="one of two heads, at a scale that is too low for it",
        task=training(Branches, weighted, plain_vectors),
        cause="underflow",
        verified=True,
        loss_scale=8.0,
    ),
)


def rounded() -> nn.Module:
    """Weights in bf16, near 1, where numbers are 1/128 apart."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.0)
    return model


class Mixed(nn.Module):
    """A trunk in fp32, and a table of embeddings in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"table": nn.Embedding(6, 8).to(torch.bfloat16), "out": nn.Linear(8, 2)})

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.parts["out"](self.parts["table"](tokens))
        return result


def tokens() -> list[Any]:
    return [(torch.arange(6), torch.randn(6, 2)) for _ in range(2)]


class Tracked(nn.Module):
    """A running mean of features, kept in bf16: each batch adds a thousandth of the way, which is less than it can hold."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("center", torch.full((8,), 1.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        with torch.no_grad():
            self.center.lerp_(features.mean(dim=0).to(self.center.dtype), 1e-3)
        result: Tensor = self.head(features - self.center)
        return result


ADAM = partial(torch.optim.AdamW, lr=1e-4)

UPDATE = (
    Case(
        name="AdamW with weights in bf16",
        task=training(rounded, regression, vectors, optimizer=ADAM),
        cause="update",
        precision="bf16",
        max_steps=4,
    ),
    Case(
        name="AdamW with weights in bf16, by the CPU's own autocast",
        task=training(rounded, regression, vectors, optimizer=ADAM),
        cause="update",
        precision="bf16",
        target=None,
        max_steps=4,
    ),
    Case(
        name="SGD with weights in bf16",
        task=training(rounded, regression, vectors, optimizer=partial(torch.optim.SGD, lr=1e-5)),
        cause="update",
        precision="bf16",
        max_steps=4,
    ),
    Case(
        name="embeddings in bf16 below a layer in fp32",
        task=training(Mixed, regression, tokens, optimizer=ADAM),
        cause="update",
        precision="bf16",
        max_steps=4,
    ),
    Case(
        name="a running mean in bf16",
        task=training(Tracked, regression, vectors),
        cause="update",
        precision="bf16",
        max_steps=4,
    ),
)
