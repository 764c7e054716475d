"""What no precision can help: the batch, the weights, or a model that breaks in fp32 as well."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import NOWHERE, Case, training

__all__ = ["DATA", "MODEL", "PARAMETERS"]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def vectors() -> list[Any]:
    return [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(3)]


def second_batch_with(value: float, *, of: int) -> list[Any]:
    """Three batches, the second of which holds a value that is not finite."""
    batches = vectors()
    batches[1][of][2, 1] = value
    return batches


class Fields(nn.Module):
    """Reads two fields of a batch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"image": nn.Conv2d(1, 2, 3), "depth": nn.Linear(3, 2)})

    def forward(self, batch: dict[str, Any]) -> Tensor:
        joined: Tensor = self.parts["image"](batch["image"]).mean(dim=(2, 3)) + self.parts["depth"](batch["extra"]["depth"])
        return joined


def field_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch), batch["label"])


def fields_with_nan() -> list[Any]:
    """A sensor that gave no number, two levels down."""
    depth = torch.randn(4, 3)
    depth[3] = math.nan
    return [{"image": torch.randn(4, 1, 5, 5), "extra": {"depth": depth}, "label": torch.tensor([0, 1, 0, 1])}]


DATA = (
    Case(name="NaN in an input", task=training(small, regression, partial(second_batch_with, math.nan, of=0)), cause="data"),
    Case(
        name="an infinite target, in bf16",
        task=training(small, regression, partial(second_batch_with, math.inf, of=1)),
        cause="data",
        precision="bf16",
    ),
    Case(
        name="NaN in an input, by the CPU's own autocast",
        task=training(small, regression, partial(second_batch_with, math.nan, of=0)),
        cause="data",
        precision="bf16",
        target=None,
    ),
    Case(name="NaN in a field of a field that the model uses", task=training(Fields, field_loss, fields_with_nan), cause="data"),
)


def broken_weight() -> nn.Module:
    model = small()
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 3] = math.nan
    return model


class Backbone(nn.Module):
    """A frozen normalization whose statistics were spoiled when they were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv1d(1, 2, 3), "norm": nn.BatchNorm1d(2)})
        self.head = nn.Linear(2, 2)
        self.stem.get_buffer("norm.running_mean")[1] = math.inf

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.stem["norm"](self.stem["conv"](x.unsqueeze(1))).mean(dim=-1))
        return result


def rarely_used() -> nn.Module:
    """Embeddings in fp16, of which each batch uses others."""
    return nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(8, 2)).half()


def tokens() -> list[Any]:
    return [(torch.tensor([[1, 2], [3, 4]]) + 4 * number, torch.randn(2, 2)) for number in range(2)]


def dead_unit() -> nn.Module:
    """A unit of the first layer is never active, so its gradient is zero."""
    model = small()
    nn.init.constant_(model.get_parameter("0.bias")[3:4], -50.0)
    return model.half()


PARAMETERS = (
    Case(name="NaN in a weight", task=training(broken_weight, regression, vectors), cause="parameters"),
    Case(
        name="NaN in a weight, by the CPU's own autocast",
        task=training(broken_weight, regression, vectors),
        cause="parameters",
        precision="bf16",
        target=None,
    ),
    Case(
        name="infinite statistics of a frozen normalization",
        task=training(Backbone, regression, vectors),
        cause="parameters",
        precision="bf16",
    ),
    # Adam's eps, 1e-8, is zero in fp16, and so is the square of a small gradient: where the gradient is zero, the first update is 0 / 0.
    Case(
        name="Adam on embeddings in fp16, the first step of which makes NaN",
        task=training(rarely_used, regression, tokens, optimizer=partial(torch.optim.Adam, lr=1e-3)),
        cause="parameters",
        loss_scale=1.0,
        max_steps=4,
    ),
    Case(
        name="AdamW on layers in fp16 with a dead unit",
        task=training(dead_unit, regression, vectors, optimizer=partial(torch.optim.AdamW, lr=1e-3, foreach=True)),
        cause="parameters",
        loss_scale=1.0,
        max_steps=4,
    ),
)


class LogScale(nn.Module):
    """The logarithm of what nothing keeps above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.scale(x))  # here: logarithm of a negative number


def rate_of_none(model: Any, batch: Any) -> Tensor:
    """An average over the positives of a batch that has none."""
    x, y = batch
    chosen = (y > 100.0).float()
    losses = (model(x).float() - y).abs() * chosen
    result: Tensor = losses.sum() / chosen.sum()  # here: average of none
    return result


class Lengths(nn.Module):
    """The root of a sum of squares, which has no derivative for a padded row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(x)
        result: Tensor = (out * out).sum(dim=-1).sqrt()  # here: root at zero
        return result


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"inner": inner})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.branches["inner"](x)
        return result


def length_loss(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    result: Tensor = model(x).float().mean()
    return result


def with_padding() -> list[Any]:
    return [(torch.cat([torch.randn(3, 4), torch.zeros(1, 4)]), torch.zeros(4, 2))]


class Lowest(nn.Module):
    """Adds the most negative number of the scores' own dtype twice: that is -inf in any of them, and for an empty sequence NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        empty = torch.tensor([0.0, 1.0, 0.0])[:, None]
        mask = (empty * torch.finfo(scores.dtype).min).to(scores.dtype)
        result: Tensor = (scores + (mask + mask)).softmax(dim=-1)  # here: lowest twice
        return result


def entropy(model: Any, batch: Any) -> Tensor:
    result: Tensor = -(model(batch) + 1e-3).log().mean()
    return result


def three_rows() -> list[Any]:
    return [torch.randn(3, 4) for _ in range(2)]


class Exponents(nn.Module):
    """A softmax by hand of scores in the thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 5)
        nn.init.constant_(self.scores.bias, 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        powers = self.scores(x).exp()  # here: exponents
        result: Tensor = powers / powers.sum(dim=-1, keepdim=True)
        return result


MODEL = (
    Case(
        name="the logarithm of a negative number",
        task=training(lambda: Nested(LogScale()), regression, vectors),
        cause="model",
        op="aten.log.default",
        module="branches.inner",
        marker="here: logarithm of a negative number",
        verified=False,
    ),
    Case(
        name="an average of none, in bf16",
        task=training(small, rate_of_none, vectors),
        cause="model",
        op="aten.div.Tensor",
        module=NOWHERE,
        marker="here: average of none",
        verified=False,
        precision="bf16",
    ),
    Case(
        name="an average of none, by the CPU's own autocast",
        task=training(small, rate_of_none, vectors),
        cause="model",
        op="aten.div.Tensor",
        module=NOWHERE,
        marker="here: average of none",
        verified=False,
        target=None,
    ),
    Case(
        name="the root of a length of zero",
        task=training(lambda: nn.Sequential(Lengths()), length_loss, with_padding),
        cause="model",
        op="aten.div.Tensor",
        module="0",
        marker="here: root at zero",
        verified=False,
    ),
    Case(
        name="the root of a length of zero, in bf16",
        task=training(lambda: nn.Sequential(Lengths()), length_loss, with_padding),
        cause="model",
        op="aten.div.Tensor",
        module="0",
        marker="here: root at zero",
        verified=False,
        precision="bf16",
    ),
    Case(  # That fp16 numbers can be added in fp32 is a remedy, but none that the model needs: it breaks there with fp32's own numbers.
        name="the lowest number twice",
        task=training(lambda: Nested(Lowest()), entropy, three_rows),
        cause="model",
        op="aten.add.Tensor",
        module="branches.inner",
        marker="here: lowest twice",
    ),
    Case(
        name="a softmax by hand",
        task=training(lambda: Nested(Exponents()), entropy, three_rows),
        cause="model",
        op="aten.exp.default",
        module="branches.inner",
        marker="here: exponents",
        verified=False,
        precision="bf16",
    ),
)
