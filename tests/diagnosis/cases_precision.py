"""An operation whose result is finite and has lost its digits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import NOWHERE, Case, training

__all__ = ["PRECISION"]


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


class Rotary(nn.Module):
    """Angles of positions as a product of matrices, which autocast runs in half, whatever is cast to fp32 before."""

    speeds: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("speeds", 100.0 ** -(torch.arange(0, width, 2).float() / width))

    def forward(self, positions: Tensor) -> Tensor:
        cosines = (positions.float()[:, None] @ self.speeds[None]).cos()  # here: table of positions
        return cosines.float()


class Positioned(nn.Module):
    """Turns a sequence by its positions, far from the beginning of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"rotary": Rotary(16), "mix": nn.Linear(8, 4)})

    def forward(self, positions: Tensor) -> Tensor:
        result: Tensor = self.layers["mix"](self.layers["rotary"](positions))
        return result


def late_positions(first: int) -> list[Any]:
    return [(torch.arange(first + step, first + step + 24), torch.randn(24, 4)) for step in range(2)]


class Waves(nn.Module):
    """Sines of a time that is cast to the dtype of what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.lift(x)
        speeds = torch.linspace(1.0, 0.3, 8)
        waves = torch.sin(time[:, None].to(hidden.dtype) * speeds.to(hidden.dtype))  # here: waves
        result: Tensor = self.out(hidden * 0.1 + waves)
        return result


def timed_loss(model: Any, batch: Any) -> Tensor:
    x, time, y = batch
    return F.mse_loss(model(x, time).float(), y)


def times() -> list[Any]:
    return [(torch.randn(12, 4), torch.randint(600, 1000, (12,)).float() + 0.5, torch.randn(12, 2)) for _ in range(2)]


class Centered(nn.Module):
    """A norm whose variance is a difference of two large numbers that are nearly equal."""

    def forward(self, x: Tensor) -> Tensor:
        mean, square = x.mean(dim=-1, keepdim=True), (x * x).mean(dim=-1, keepdim=True)
        variance = square - mean * mean  # here: variance by subtraction
        return (x - mean) / (variance.clamp(min=0.0) + 0.1).sqrt()


def off_center(norm: nn.Module, *, offset: float, spread: float) -> nn.Module:
    """A norm behind features that vary little around a large number."""
    first = nn.Linear(4, 16)
    nn.init.normal_(first.weight, std=spread)
    nn.init.constant_(first.bias, offset)
    return nn.Sequential(first, norm, nn.Linear(16, 2))


def vectors(*, count: int = 6) -> list[Any]:
    return [(torch.randn(count, 4), torch.randn(count, 2)) for _ in range(2)]


def sharpness(model: Any, batch: Any) -> Tensor:
    """Variance in the loss itself, of images that are bright throughout."""
    x, y = batch
    out = model(x)
    contrast = (out * out).mean(dim=(1, 2, 3)) - out.mean(dim=(1, 2, 3)) ** 2  # here: contrast
    return F.mse_loss(contrast.float(), y)


def bright() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    nn.init.constant_(model.get_parameter("0.bias"), 60.0)
    return model


def images() -> list[Any]:
    return [(torch.randn(3, 1, 5, 5), torch.ones(3)) for _ in range(2)]


def expanded_distances(model: Any, batch: Any) -> Tensor:
    """The square of a distance as |a|^2 + |b|^2 - 2ab, for points that are close together and far from zero."""
    x, _ = batch
    points = model(x)
    lengths = (points * points).mean(dim=-1)
    products = points @ points.t() / points.size(-1)
    apart = lengths[:, None] + lengths[None] - 2 * products  # here: expanded square
    result: Tensor = apart.float().abs().mean()
    return result


def far_points() -> nn.Module:
    model = nn.Linear(4, 8)
    nn.init.constant_(model.bias, 20.0)
    return model


class Odds(nn.Module):
    """Odds of events that are nearly certain: what is missing to 1 is less than half precision can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(4, 2)
        nn.init.constant_(self.logits.bias, 6.0)

    def forward(self, x: Tensor) -> Tensor:
        p = self.logits(x).sigmoid()
        missing = 1 - p  # here: missing to one
        result: Tensor = p / (missing + 1e-3)
        return result


def odds_loss(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    result: Tensor = model(x).float().mean() * 1e-3
    return result


PRECISION = (
    # The product has the error of its inputs; in the cosine of thousands, that is all there is. Both are on one line.
    Case(
        name="a table of positions in bf16",
        task=training(Positioned, regression, partial(late_positions, 2000)),
        cause="precision",
        module="layers.rotary",
        marker="here: table of positions",
        verified=True,
        precision="bf16",
    ),
    Case(
        name="a table of positions in bf16, by the CPU's own autocast",
        task=training(Positioned, regression, partial(late_positions, 3000)),
        cause="precision",
        module="layers.rotary",
        marker="here: table of positions",
        verified=True,
        precision="bf16",
        target=None,
    ),
    Case(
        name="a table of positions in fp16",
        task=training(Positioned, regression, partial(late_positions, 30000)),
        cause="precision",
        module="layers.rotary",
        marker="here: table of positions",
        verified=True,
    ),
    Case(
        name="sines of times in bf16",
        task=training(Waves, timed_loss, times),
        cause="precision",
        module="",
        marker="here: waves",
        precision="bf16",
    ),
    Case(
        name="a variance by subtraction in bf16",
        task=training(lambda: off_center(Centered(), offset=20.0, spread=0.5), regression, vectors),
        cause="precision",
        op="aten.sub.Tensor",
        module="1",
        marker="here: variance by subtraction",
        precision="bf16",
    ),
    Case(
        name="a variance by subtraction in fp16, by the CPU's own autocast",
        task=training(lambda: off_center(Centered(), offset=100.0, spread=0.5), regression, vectors),
        cause="precision",
        op="aten.sub.Tensor",
        module="1",
        marker="here: variance by subtraction",
        target=None,
        loss_scale=8.0,
    ),
    Case(
        name="a contrast by subtraction in a loss",
        task=training(bright, sharpness, images),
        cause="precision",
        op="aten.sub.Tensor",
        module=NOWHERE,
        marker="here: contrast",
        precision="bf16",
    ),
    Case(
        name="the expansion of a squared distance",
        task=training(far_points, expanded_distances, vectors),
        cause="precision",
        op="aten.sub.Tensor",
        module=NOWHERE,
        marker="here: expanded square",
        precision="bf16",
    ),
    Case(
        name="what is missing to one",
        task=training(lambda: nn.Sequential(Odds()), odds_loss, vectors),
        cause="precision",
        op="aten.rsub.Scalar",
        module="0",
        marker="here: missing to one",
        verified=True,
        precision="bf16",
    ),
)
