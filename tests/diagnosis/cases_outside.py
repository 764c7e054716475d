"""An operation of the forward pass that low precision makes infinite or NaN, in code outside of any module or without gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.case import NOWHERE, Case, training

__all__ = ["OUTSIDE"]


def conv_net() -> nn.Module:
    """One output for each of many pixels."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 1, 1))
    nn.init.constant_(model.get_parameter("2.bias"), 3.0)
    return model


def masks() -> list[Any]:
    """300 x 300 pixels, of which more are set than fp16 can count."""
    return [(torch.randn(1, 1, 300, 300), torch.ones(1, 1, 300, 300)) for _ in range(2)]


def overlap_by_sums(model: Any, batch: Any) -> Tensor:
    x, mask = batch
    p = model(x).sigmoid()
    common = (p * mask.to(p.dtype)).sum()  # here: counted by a sum
    result: Tensor = 1 - (2 * common + 1) / (p.sum() + mask.sum() + 1)
    return result


def overlap_by_einsum(model: Any, batch: Any) -> Tensor:
    """A sum of products is a product of matrices to autocast, and runs in half on CUDA, where `sum` does not."""
    x, mask = batch
    p = model(x).sigmoid()
    common = torch.einsum("bchw,bchw->b", p, mask)  # here: counted by a product
    total = p.sum(dim=(1, 2, 3)) + mask.sum(dim=(1, 2, 3))
    result: Tensor = (1 - (2 * common + 1) / (total + 1)).mean()
    return result


def overlap_by_means(model: Any, batch: Any) -> Tensor:
    """A mean is in range, and the number of pixels that it is multiplied by is not."""
    x, mask = batch
    p = model(x).sigmoid()
    area = p.mean() * p.numel()  # here: counted by a mean
    result: Tensor = (1 - (2 * (p * mask).mean() * p.numel() + 1) / (area + mask.sum() + 1)).float()
    return result


def embedder() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def views() -> list[Any]:
    """Two views of the same four things, so that the right pairs are very similar."""
    base = torch.randn(2, 4, 8)
    return [(each, each + 0.01 * torch.randn(4, 8)) for each in base]


def contrast_by_exp(model: Any, batch: Any) -> Tensor:
    first, second = (F.normalize(model(view), dim=-1) for view in batch)
    similar = (first @ second.t() / 0.07).exp()  # here: e to the 14th
    return -(similar.diagonal() / similar.sum(dim=1)).log().mean()


def contrast_by_exp2(model: Any, batch: Any) -> Tensor:
    """Autocast of CUDA has `exp` on its list of what runs in fp32, and `exp2` not."""
    first, second = (F.normalize(model(view), dim=-1) for view in batch)
    similar = torch.exp2(first @ second.t() * 20.0)  # here: 2 to the 20th
    return -(similar.diagonal() / similar.sum(dim=1)).log().mean()


def contrast_unscaled(model: Any, batch: Any) -> Tensor:
    """Raw products, which are divided when it is too late; the embeddings themselves are in range."""
    first, second = (model(view) * 2000.0 for view in batch)
    scores = first @ second.t() / 1e6  # here: divided late
    return F.cross_entropy(scores, torch.arange(len(scores)))


class Matcher(nn.Module):
    """Pairs each prediction with the nearest target. With costs that are all infinite it always takes the first, and nothing is NaN."""

    @torch.no_grad()
    def forward(self, boxes: Tensor, targets: Tensor) -> Tensor:
        apart = boxes[:, None] - targets.to(boxes.dtype)[None]
        costs = (apart * apart).mean(dim=-1)  # here: costs
        return costs.argmin(dim=1)


class Detector(nn.Module):
    """Predicts boxes in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.matcher = nn.Linear(8, 4), Matcher()

    def forward(self, x: Tensor) -> Tensor:
        boxes: Tensor = self.boxes(x)
        return boxes


def matched_loss(model: Any, batch: Any) -> Tensor:
    x, targets = batch
    boxes = model(x)
    return F.smooth_l1_loss(boxes / 1000.0, targets[model.matcher(boxes, targets)] / 1000.0)


def boxes() -> list[Any]:
    return [(torch.randn(4, 8), torch.rand(5, 4) * 1000.0 + 500.0) for _ in range(2)]


def loss_with_meter(model: Any, batch: Any) -> Tensor:
    """A loss that is fine, and a number for a chart that is not."""
    x, y = batch
    predicted = model(x)
    with torch.no_grad():
        in_cents = predicted * 100.0
        spread = (in_cents * in_cents).mean().sqrt()  # here: a number for a chart
    model.last_spread.copy_(spread)
    return F.mse_loss(predicted, y)


class Metered(nn.Module):
    """A regression that keeps a number for a chart."""

    last_spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 1)
        nn.init.constant_(self.body.bias, 40.0)
        self.register_buffer("last_spread", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def targets_near_forty() -> list[Any]:
    return [(torch.randn(4, 8), 40.0 + torch.randn(4, 1)) for _ in range(2)]


OUTSIDE = (
    Case(
        name="an overlap of masks by a sum, by the CPU's own autocast",
        task=training(conv_net, overlap_by_sums, masks),
        cause="forward",
        op="aten.sum.default",
        module=NOWHERE,
        marker="here: counted by a sum",
        target=None,
    ),
    Case(
        name="an overlap of masks by a product",
        task=training(conv_net, overlap_by_einsum, masks),
        cause="forward",
        op="aten.bmm.default",
        module=NOWHERE,
        marker="here: counted by a product",
        verified=True,
    ),
    Case(
        name="an overlap of masks by a mean",
        task=training(conv_net, overlap_by_means, masks),
        cause="forward",
        op="aten.mul.Tensor",
        module=NOWHERE,
        marker="here: counted by a mean",
    ),
    Case(
        name="similarities by hand, by the CPU's own autocast",
        task=training(embedder, contrast_by_exp, views),
        cause="forward",
        op="aten.exp.default",
        module=NOWHERE,
        marker="here: e to the 14th",
        verified=True,
        loss_scale=128.0,
        target=None,
    ),
    Case(
        name="similarities by powers of two",
        task=training(embedder, contrast_by_exp2, views),
        cause="forward",
        op="aten.exp2.default",
        module=NOWHERE,
        marker="here: 2 to the 20th",
        verified=True,
        loss_scale=128.0,
    ),
    Case(
        name="similarities that are divided after the product",
        task=training(embedder, contrast_unscaled, views),
        cause="forward",
        op="aten.mm.default",
        module=NOWHERE,
        marker="here: divided late",
        verified=True,
    ),
    Case(
        name="costs of a matcher",
        task=training(Detector, matched_loss, boxes),
        cause="forward",
        op="aten.mul.Tensor",
        module="matcher",
        marker="here: costs",
    ),
    Case(
        name="a number for a chart",
        task=training(Metered, loss_with_meter, targets_near_forty),
        cause="forward",
        op="aten.mul.Tensor",
        module=NOWHERE,
        marker="here: a number for a chart",
        loss_scale=256.0,
    ),
)
