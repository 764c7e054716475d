"""Embeddings with sparse gradients at every level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

from halfstep import amp
from halfstep.amp.gradients import unscale_
from tests.amp.nets import INF

LEVELS = ("O0", "O1", "O2", "O3")
TOKENS = torch.tensor([1, 2, 2, 5])


class Tagger(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4, sparse=sparse)
        self.last = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(self.embedding(tokens))
        return result


def optimizers_of(model: Tagger, kind: Any) -> list[Optimizer]:
    return [kind([model.embedding.weight], lr=0.125), SGD(model.last.parameters(), lr=0.125)]


def train(level: str, *, sparse: bool, kind: Any = SGD, factors: tuple[float, ...] = (1.0, 1.0), **arguments: Any) -> Tagger:
    model = Tagger(sparse=sparse)
    _, optimizers = amp.initialize(model, optimizers_of(model, kind), opt_level=level, **arguments)
    for factor in factors:
        model.zero_grad()
        # The gradients of one backward pass are added to those of another. Without a scale torch adds them, which it cannot in half.
        for part in (TOKENS, TOKENS + 1)[: 1 if level == "O3" and not arguments.get("loss_scale") else 2]:
            with amp.scale_loss(model(part).square().mean() * factor, optimizers) as scaled_loss:
                scaled_loss.backward()
            assert model.embedding.weight.grad is not None
            assert model.embedding.weight.grad.is_sparse == sparse
            assert model.embedding.weight.grad.dtype is model.embedding.weight.dtype
        for optimizer in optimizers:
            optimizer.step()
    return model


@pytest.mark.parametrize("loss_scale", [None, 128.0, "dynamic"])
@pytest.mark.parametrize("level", LEVELS)
def test_they_train_as_dense_ones(level: str, loss_scale: Any) -> None:
    found, expected = (train(level, sparse=sparse, loss_scale=loss_scale) for sparse in (True, False))
    assert not torch.equal(found.embedding.weight, Tagger(sparse=True).embedding.weight.to(found.embedding.weight.dtype))
    half = found.embedding.weight.dtype is torch.float16
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3 if half else 1e-4, atol=2e-3 if half else 1e-5)


@pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", LEVELS)
def test_sparse_adam(level: str, loss_scale: Any) -> None:
    found = train(level, sparse=True, kind=SparseAdam, loss_scale=loss_scale).embedding.weight.detach().float()
    before = Tagger(sparse=True).embedding.weight.detach()
    moved = (found - before).abs() > 0.05
    used = [1, 2, 3, 5, 6]
    assert moved[used].all()
    assert not moved[[0, 4, 7]].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_the_step(level: str) -> None:
    found = train(level, sparse=True, factors=(1.0, INF), loss_scale="dynamic")
    expected = train(level, sparse=True, factors=(1.0,), loss_scale="dynamic")
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_in_half_are_divided_in_fp32_and_checked(dtype: torch.dtype, coalesced: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    for bad, scale in ((None, 2.0**25), (INF, 4.0), (None, 2.0**-16)):
        values = torch.tensor([[1024.0, 2048.0 if bad is None else bad], [1.0, 0.0]], dtype=dtype)
        indices = torch.tensor([[0, 2] if coalesced else [2, 2]])
        gradient = torch.sparse_coo_tensor(indices, values.clone(), (3, 2), check_invariants=True)
        parameter.grad = gradient.coalesce() if coalesced else gradient
        found = unscale_([SGD([parameter], lr=1.0)], scale=torch.tensor(scale), rechecks=True)
        divided = (values.float() / scale).to(dtype)
        assert found.item() == (not divided.isfinite().all())
        assert parameter.grad.is_sparse
        if bad is None:
            expected = torch.sparse_coo_tensor(indices, divided, (3, 2), check_invariants=True)
            assert torch.equal(parameter.grad.to_dense(), expected.to_dense())
            assert parameter.grad.is_coalesced() == coalesced
