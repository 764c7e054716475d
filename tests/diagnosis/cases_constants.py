"""A constant that is in the code for safety, and that half precision rounds to zero, to one, or to infinity."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import NOWHERE, Case, training

__all__ = ["CONSTANTS"]


def projection() -> nn.Module:
    """Keeps zero at zero, so that padding is still zero behind it."""
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())


def padded() -> list[Any]:
    """The last two rows are padding."""
    return [(torch.cat([torch.randn(3, 4), torch.zeros(2, 4)]), torch.randn(5, 4)) for _ in range(2)]


def unit_vectors(model: Any, batch: Any) -> Tensor:
    """The guard of F.normalize, 1e-12, is zero in fp16. CUDA computes norms in fp32, and a CPU in half."""
    x, y = batch
    unit = F.normalize(model(x), dim=-1)  # here: unit vectors
    return F.mse_loss(unit.float(), y)


def unit_vectors_without_autocast(model: Any, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    with torch.autocast("cpu", enabled=False):
        unit = F.normalize(out, dim=-1)  # here: unit vectors without autocast
    return F.mse_loss(unit.float(), y)


class MinMax(nn.Module):
    """Stretches scores to between 0 and 1. Where all are equal, only the guard keeps it from dividing by zero."""

    def forward(self, scores: Tensor) -> Tensor:
        low, high = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
        return (scores - low) / (high - low + 1e-8)  # here: added guard


class ClampedMinMax(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        low, high = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
        width = (high - low).clamp(min=1e-8)
        return (scores - low) / width  # here: clamped guard


def equal_scores() -> list[Any]:
    """In the first row all the entries are the same, and so are their scores."""
    first = torch.randn(3, 6, 1)
    first[0] = 0.5
    return [(first, torch.rand(3, 6))]


def scorer(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Flatten(), norm)


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


class Sums(nn.Module):
    """Attention that adds two masks of the most negative fp16, one of queries and one of keys. Their sum is -inf in fp16.

    A sequence that is empty has nothing else, and becomes NaN. In fp32 the sum is a number, and all weights of that sequence are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * 0.5
        lowest = (padding * torch.finfo(torch.float16).min).to(scores.dtype)
        mask = lowest[:, :, None] + lowest[:, None, :]  # here: two masks
        weights = (scores + mask).softmax(dim=-1)
        result: Tensor = weights @ self.value(x)
        return result


class Summand(nn.Module):
    """One mask, added to scores that are well below zero: in fp16 that goes beyond the range, too. One query may see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(4, 6), nn.Linear(4, 4)
        nn.init.constant_(self.score.bias, -80.0)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.score(x)
        mask = (padding * torch.finfo(scores.dtype).min).to(scores.dtype)
        weights = (scores + mask[:, :, None]).softmax(dim=-1)  # here: mask as a summand
        result: Tensor = weights @ self.value(x)
        return result


class Chosen(nn.Module):
    """A mask of -1e9, by `where`: that is -inf in fp16, and a query that may see nothing has only those."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        hidden = (padding[:, :, None] + padding[:, None, :]) > 0
        scores = torch.where(hidden, -1e9, scores)  # here: chosen mask
        weights = scores.softmax(dim=-1)
        result: Tensor = weights @ self.value(x)
        return result


class Masked(nn.Module):
    """An attention by name, so that its path is not empty."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"attention": attention})

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.layers["attention"](batch["tokens"], batch["padding"])
        return result


def masked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch), batch["wanted"])


def padded_sequences() -> list[Any]:
    """The second sequence is empty."""
    padding = torch.stack([torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.ones(6)])
    return [{"tokens": torch.randn(2, 6, 4), "padding": padding, "wanted": torch.randn(2, 6, 4)} for _ in range(2)]


def classifier() -> nn.Module:
    """Sure of itself: its logits are far from zero."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.constant_(model.get_parameter("2.bias"), 16.0)
    return model


def yes_and_no() -> list[Any]:
    return [(torch.randn(6, 4), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])[:, None]) for _ in range(2)]


def cross_entropy_by_hand(model: Any, batch: Any) -> Tensor:
    """1 - 1e-6 is 1 in bf16 and in fp16, and the logarithm is one of zero."""
    x, y = batch
    p = model(x).sigmoid().clamp(1e-6, 1 - 1e-6)
    result: Tensor = -(y * p.log() + (1 - y) * (1 - p).log()).mean()  # here: logarithm of zero
    return result


class Policy(nn.Module):
    """Actions between -1 and 1, whose log-likelihood needs them before they were squashed."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 2)
        nn.init.constant_(self.mean.bias, 6.0)

    def forward(self, x: Tensor) -> Tensor:
        action = torch.tanh(self.mean(x))
        return torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6))  # here: unsquashed


def states() -> list[Any]:
    return [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(2)]


CONSTANTS = (
    Case(
        name="unit vectors of padding, by the CPU's own autocast",
        task=training(projection, unit_vectors, padded),
        cause="forward",
        op="aten.div.Tensor",
        module=NOWHERE,
        marker="here: unit vectors",
        target=None,
    ),
    Case(
        name="unit vectors of padding, without autocast",
        task=training(projection, unit_vectors_without_autocast, padded),
        cause="forward",
        op="aten.div.Tensor",
        module=NOWHERE,
        marker="here: unit vectors without autocast",
    ),
    Case(
        # In fp32 the forward pass is fine, and so is its norm on CUDA. The gradient of the padding is divided by 1e-12 in fp32, does not
        # fit into half at any scale, and times the zeros of the padding is NaN in the weights.
        name="unit vectors of padding, backward",
        task=training(projection, unit_vectors, padded),
        cause="backward",
        op="aten._to_copy.default",
        module=NOWHERE,
        marker="here: unit vectors",
    ),
    Case(
        name="equal scores and an added guard",
        task=training(lambda: scorer(MinMax()), regression, equal_scores),
        cause="forward",
        op="aten.div.Tensor",
        module="2",
        marker="here: added guard",
    ),
    Case(
        name="equal scores and a clamped guard, by the CPU's own autocast",
        task=training(lambda: scorer(ClampedMinMax()), regression, equal_scores),
        cause="forward",
        op="aten.div.Tensor",
        module="2",
        marker="here: clamped guard",
        target=None,
    ),
    Case(
        name="two masks that are added",
        task=training(lambda: Masked(Sums()), masked_loss, padded_sequences),
        cause="forward",
        op="aten.add.Tensor",
        module="layers.attention",
        marker="here: two masks",
        verified=True,
    ),
    Case(
        name="a mask that is added to scores below zero",
        task=training(lambda: Masked(Summand()), masked_loss, padded_sequences),
        cause="forward",
        op="aten.add.Tensor",
        module="layers.attention",
        marker="here: mask as a summand",
        verified=True,
    ),
    Case(  # The number becomes -inf when a tensor is made of it, which is an operation of its own below `where`.
        name="a mask of -1e9 that is chosen",
        task=training(lambda: Masked(Chosen()), masked_loss, padded_sequences),
        cause="forward",
        module="layers.attention",
        marker="here: chosen mask",
        verified=True,
    ),
    Case(
        name="cross entropy by hand in bf16",
        task=training(classifier, cross_entropy_by_hand, yes_and_no),
        cause="forward",
        op="aten.log.default",
        module=NOWHERE,
        marker="here: logarithm of zero",
        precision="bf16",
    ),
    Case(
        name="cross entropy by hand in fp16, by the CPU's own autocast",
        task=training(classifier, cross_entropy_by_hand, yes_and_no),
        cause="forward",
        op="aten.log.default",
        module=NOWHERE,
        marker="here: logarithm of zero",
        target=None,
    ),
    Case(
        name="the inverse of a squashing function",
        task=training(lambda: nn.Sequential(Policy()), regression, states),
        cause="forward",
        op="aten.atanh.default",
        module="0",
        marker="here: unsquashed",
        verified=True,
        precision="bf16",
    ),
)
