"""Training that is well, however it looks: infinities and NaN that are meant, that no one uses, or that what follows puts right."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.diagnosis.case import Case, training

__all__ = ["CLEAN"]


def regression(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def vectors() -> list[Any]:
    return [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(2)]


def sequences() -> list[Any]:
    return [(torch.randn(2, 6, 4), torch.randn(2, 6, 4)) for _ in range(2)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def constrained(kind: Any) -> nn.Module:
    """A layer whose weight is computed anew in each forward pass."""
    return nn.Sequential(kind(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


class Recurrent(nn.Module):
    """A recurrent layer that is given the state that it begins with, in fp32."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, x.size(0), 6)
        out, _ = self.rnn(x, (state, state) if isinstance(self.rnn, nn.LSTM) else state)
        result: Tensor = self.head(out)
        return result


class Causal(nn.Module):
    """Attention under a mask of -inf that leaves something to see in each row."""

    def __init__(self, lowest: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.lowest = lowest

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * 0.5
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        result: Tensor = torch.where(later, self.lowest, scores).softmax(dim=-1) @ self.value(x)
        return result


class Summed(nn.Module):
    """Adds the most negative number of the dtype to scores: in fp16 the sum is -inf, and the weight is zero as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.value = nn.Linear(4, 6), nn.Linear(4, 4)
        nn.init.constant_(self.scores.bias, -60.0)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        mask = torch.full((6, 6), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        result: Tensor = (scores + mask).softmax(dim=-1) @ self.value(x)
        return result


class Encoder(nn.Module):
    """A block of torch's own, with a mask of -inf and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.size(1)), is_causal=True)
        return result


class Streaming(nn.Module):
    """A softmax in blocks: the running maximum begins at -inf, and the first block's correction is e to the minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        highest = torch.full((*x.shape[:2], 1), -math.inf, dtype=query.dtype)
        total, mixed = torch.zeros_like(highest), torch.zeros_like(query)
        for part in x.chunk(3, dim=1):
            scores = query @ self.key(part).transpose(1, 2) * 0.5
            above = torch.maximum(highest, scores.amax(dim=-1, keepdim=True).detach())
            kept, weights = (highest - above).exp(), (scores - above).exp()
            total, mixed = total * kept + weights.sum(dim=-1, keepdim=True), mixed * kept + weights @ self.value(part)
            highest = above
        return mixed / total


def loss_with_perplexity(model: Any, batch: Any) -> Tensor:
    """A metric that takes the logarithm of what may be zero, and throws that away where it is."""
    x, y = batch
    out = model(x)
    with torch.no_grad():
        p = (out * 30.0).softmax(dim=-1).to(out.dtype) * (out > out.mean())
        entropy = torch.where(p > 0, p.log() * p, 0.0).sum()
    assert not entropy.isnan()
    return F.mse_loss(out.float(), y)


def loss_of_one_field(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(model(batch["features"]).float(), batch["wanted"])


def with_an_unused_field() -> list[Any]:
    return [{"features": torch.randn(8, 4), "wanted": torch.randn(8, 2), "weather": torch.full((8,), math.nan)} for _ in range(2)]


def loss_where_known(model: Any, batch: Any) -> Tensor:
    """Targets that are NaN where nobody knows them, and that no gradient comes from."""
    x, y = batch
    known = ~y.isnan()
    error = model(x).float() - y
    result: Tensor = torch.where(known, error, 0.0).square().sum() / known.sum()
    return result


def partly_known() -> list[Any]:
    batches = vectors()
    for _, y in batches:
        y[::3, 0] = math.nan
    return batches


def cleaned(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x.nan_to_num(0.0, 0.0, 0.0)).float(), y)


def with_gaps() -> list[Any]:
    batches = vectors()
    for x, _ in batches:
        x[1, 2], x[3, 0] = math.nan, -math.inf
    return batches


class Guarded(nn.Module):
    """Stretches scores, some of which are all equal, with a guard that half precision can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x).squeeze(-1)
        low = scores.amin(dim=1, keepdim=True)
        width = (scores.amax(dim=1, keepdim=True) - low).float().clamp(min=1e-2)
        result: Tensor = (scores - low) / width
        return result


def equal_scores() -> list[Any]:
    first = torch.randn(3, 6, 1)
    first[0] = 0.5
    return [(first, torch.rand(3, 6))]


class SafeSquares(nn.Module):
    """The root mean square of large features, in an island of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        nn.init.normal_(self.first.weight, std=400.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        with torch.autocast("cpu", enabled=False):
            exact = wide.float()
            exact = exact * (exact.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        result: Tensor = self.last(exact)
        return result


def pictures() -> list[Any]:
    return [(torch.randn(4, 1, 6, 6), torch.randn(4, 2)) for _ in range(2)]


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(*layers)


def two_heads() -> nn.Module:
    return nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})


def one_head(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model["used"](x).float(), y)


def case(name: str, model: Any, loss: Any, batches: Any, **settings: Any) -> Case:
    """A case without a finding."""
    optimizer = settings.pop("optimizer", partial(torch.optim.SGD, lr=1e-3))
    return Case(name=name, task=training(model, loss, batches, optimizer=optimizer), cause="healthy", verified=False, **settings)


FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)
WEIGHT, SPECTRAL, ORTHOGONAL = parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal
FUSED_SGD = partial(torch.optim.SGD, lr=0.1, fused=True)
MASKED = partial(Causal, -math.inf)

CLEAN = (
    case("two layers in fp16", small, regression, vectors),
    case("two layers in bf16", small, regression, vectors, precision="bf16"),
    case("two layers in bf16, by the CPU's own autocast", small, regression, vectors, precision="bf16", target=None),
    case("a fused optimizer", small, regression, vectors, optimizer=FUSED),
    case("a fused optimizer in bf16", small, regression, vectors, optimizer=FUSED, precision="bf16"),
    case(
        "a fused SGD, by the CPU's own autocast",
        small,
        regression,
        vectors,
        target=None,
        optimizer=FUSED_SGD,
    ),
    case("a spectral norm", partial(constrained, SPECTRAL), regression, vectors),
    case("a spectral norm in bf16", partial(constrained, SPECTRAL), regression, vectors, precision="bf16"),
    case("a weight norm", partial(constrained, WEIGHT), regression, vectors),
    case("an orthogonal weight", partial(constrained, ORTHOGONAL), regression, vectors),
    case("an LSTM", partial(Recurrent, nn.LSTM), regression, sequences),
    case("a GRU in bf16", partial(Recurrent, nn.GRU), regression, sequences, precision="bf16"),
    case("an LSTM in bf16, by the CPU's own autocast", partial(Recurrent, nn.LSTM), regression, sequences, precision="bf16", target=None),
    case("a plain recurrent layer, by the CPU's own autocast", partial(Recurrent, nn.RNN), regression, sequences, target=None),
    case("a mask of -inf", MASKED, regression, sequences),
    case(
        "a mask of -inf in bf16, by the CPU's own autocast",
        partial(Causal, -math.inf),
        regression,
        sequences,
        precision="bf16",
        target=None,
    ),
    case("a mask of -1e9, which is -inf in fp16", partial(Causal, -1e9), regression, sequences),
    case("a mask of the lowest number, which becomes -inf in fp16", Summed, regression, sequences),
    case("an encoder of torch's own", Encoder, regression, sequences),
    case("a running maximum", Streaming, regression, sequences),
    case("a running maximum in bf16", Streaming, regression, sequences, precision="bf16"),
    case("the logarithm of zero in a metric", small, loss_with_perplexity, vectors),
    case("the logarithm of zero in a metric, by the CPU's own autocast", small, loss_with_perplexity, vectors, target=None),
    case("NaN in a field that nobody uses", small, loss_of_one_field, with_an_unused_field),
    case("NaN in targets that are left out", small, loss_where_known, partly_known),
    case("gaps in inputs that are filled", small, cleaned, with_gaps),
    case("a guard that holds", Guarded, regression, equal_scores, loss_scale=64.0),
    case("squares in an island of fp32", SafeSquares, regression, vectors, loss_scale=64.0),
    case("batch normalization and max pooling", convolutions, regression, pictures, loss_scale=256.0),
    case("a head that is idle", two_heads, one_head, vectors, loss_scale=256.0),
)
