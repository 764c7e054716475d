"""An operation of the forward pass that low precision makes infinite or NaN, within a module of a model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import SLOW_SGD, Case, training

__all__ = ["FORWARD"]


def vectors(*, count: int = 4, width: int = 8, steps: int = 2, spread: float = 1.0) -> list[Any]:
    """Batches of inputs and targets."""
    return [(torch.randn(count, width) * spread, torch.randn(count, 1)) for _ in range(steps)]


def sequences(*, length: int = 6, width: int = 8, spread: float = 1.0) -> list[Any]:
    return [(torch.randn(2, length, width) * spread, torch.randn(2, length, width)) for _ in range(2)]


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def widened(linear: nn.Linear, std: float) -> nn.Linear:
    """A layer with weights of another size than it is made with."""
    nn.init.normal_(linear.weight, std=std)
    return linear


class LateScaling(nn.Module):
    """Attention that divides by the root of the width only after the product, which is far larger than what is meant."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = widened(nn.Linear(width, width), 40.0), widened(nn.Linear(width, width), 40.0)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        products = torch.bmm(query, key.transpose(1, 2))  # here: scaled too late
        weights = torch.softmax(products * x.size(-1) ** -0.5, dim=-1)
        return torch.bmm(weights, self.value(x))


class Encoder(nn.Module):
    """Blocks in a list, of which the second is at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "attention": attention(8)}) for attention in (calm, LateScaling)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            parts: Any = block
            x = x + parts["attention"](parts["norm"](x))
        return x


def calm(width: int) -> nn.Module:
    return nn.Linear(width, width)


class GroupedQueries(nn.Module):
    """Four heads of queries that share two heads of keys, repeated for the product."""

    def __init__(self) -> None:
        super().__init__()
        self.to_queries, self.to_keys = widened(nn.Linear(8, 16), 60.0), widened(nn.Linear(8, 8), 60.0)
        self.to_values = nn.Linear(8, 8)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries = self.to_queries(x).view(batch, length, 4, 4).transpose(1, 2)
        keys = self.to_keys(x).view(batch, length, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1)
        values = self.to_values(x).view(batch, length, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1)
        scores = torch.einsum("bhqd,bhkd->bhqk", queries, keys) / math.sqrt(4)  # here: shared keys
        mixed = scores.softmax(dim=-1) @ values
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        return result


class Feedforward(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), widened(nn.Linear(8, 32), 2.0)
        self.down = widened(nn.Linear(32, 8, bias=False), size)

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.down(self.up(self.norm(x)).relu())  # here: down
        return x + narrow


class Stream(nn.Module):
    """A residual stream as wide in range as bf16 leaves it: NaN comes out of the norm of the next block, the infinity out of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Feedforward(1.0), Feedforward(9e3), Feedforward(1.0))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(x))
        return result


class GatedUnit(nn.Module):
    """Two projections that are each in range, and whose product is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = widened(nn.Linear(8, 16), 300.0), widened(nn.Linear(8, 16), 300.0)
        self.norm, self.down = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate(x)) * self.up(x)  # here: gated
        result: Tensor = self.down(self.norm(gated))
        return result


class Stages(nn.Module):
    """Convolutions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"stem": nn.Conv2d(1, 4, 3, padding=1), "deep": nn.Conv2d(4, 4, 3, padding=1)})
        nn.init.constant_(self.stages.get_parameter("deep.weight"), 2e4)
        self.norm = nn.GroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.stages["deep"](self.stages["stem"](x).relu())  # here: deep
        result: Tensor = self.norm(deep).mean(dim=(1, 2, 3)).unsqueeze(1)
        return result


def images() -> list[Any]:
    return [(torch.randn(2, 1, 8, 8), torch.randn(2, 1)) for _ in range(2)]


def raw_features() -> list[Any]:
    """One column counts something, and is not normalized: the first cast makes it infinite."""
    first, second = vectors()
    first[0][2, 3] = 7.5e4
    return [first, second]


class Named(nn.Module):
    """Two inputs by name, of which one is measured in odd units."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"pixels": nn.Conv1d(1, 4, 3), "meters": nn.Linear(3, 4)})

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pixels = self.branches["pixels"](batch["pixels"]).mean(dim=-1)
        joined: Tensor = pixels + self.branches["meters"](batch["meters"])  # here: meters
        return joined


def named_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = model(batch).float().square().mean()
    return result


def named_batches() -> list[Any]:
    return [{"pixels": torch.randn(4, 1, 8), "meters": torch.randn(4, 3) * 1e6} for _ in range(2)]


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def one_outlier() -> list[Any]:
    """The second batch is out of range, and the step after it would look healthy, but for the running statistics."""
    first, second, third = vectors(count=16, steps=3)
    return [first, (second[0] * 1e6, second[1]), third]


FORWARD = (
    Case(
        name="attention in a list of blocks that scales after the product",
        task=training(Encoder, regression, sequences),
        cause="forward",
        op="aten.bmm.default",
        module="blocks.1.attention",
        marker="here: scaled too late",
        verified=True,
    ),
    Case(
        name="attention that scales after the product, by the CPU's own autocast",
        task=training(Encoder, regression, sequences),
        cause="forward",
        op="aten.bmm.default",
        module="blocks.1.attention",
        marker="here: scaled too late",
        verified=True,
        target=None,
    ),
    Case(
        name="grouped queries that scale after the product",
        task=training(lambda: nn.Sequential(GroupedQueries(), nn.LayerNorm(8)), regression, sequences),
        cause="forward",
        op="aten.bmm.default",
        module="0",
        marker="here: shared keys",
        verified=True,
    ),
    Case(
        name="a projection into a residual stream",
        task=training(Stream, regression, sequences),
        cause="forward",
        op="aten.mm.default",
        module="layers.1.down",
        marker="here: down",
        verified=True,
    ),
    Case(
        name="a product of two projections",
        task=training(lambda: nn.Sequential(GatedUnit()), regression, vectors),
        cause="forward",
        op="aten.mul.Tensor",
        module="0",
        marker="here: gated",
        verified=True,
        loss_scale=64.0,
    ),
    Case(
        name="a convolution in a dictionary of stages",
        task=training(Stages, regression, images),
        cause="forward",
        op="aten.convolution.default",
        module="stages.deep",
        marker="here: deep",
        verified=True,
    ),
    Case(
        name="a feature that is not normalized, at the first cast",
        task=training(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), regression, raw_features, optimizer=SLOW_SGD),
        cause="forward",
        op="aten._to_copy.default",
        module="0",
    ),
    Case(
        name="a field of a batch that is not normalized, at its cast",
        task=training(Named, named_loss, named_batches, optimizer=SLOW_SGD),
        cause="forward",
        op="aten._to_copy.default",
        module="branches.meters",
        marker="here: meters",
    ),
    Case(
        name="one batch out of range, in front of batch normalization",
        task=training(normalized, regression, one_outlier),
        cause="forward",
        op="aten._to_copy.default",
        module="0",
        loss_scale=256.0,
        max_steps=3,
    ),
)
