"""What the ranks of `test_ranks.py` run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp
from tests.amp.nets import make_batches, sgd


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def train(rank: int, level: str, factors: list[list[float]]) -> dict[str, Any]:
    """The loop of Apex's documentation for several processes; `factors` has what the loss of each step and rank is multiplied by."""
    model = make_model()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=None if level in ("O1", "O2") else 128.0)
    parallel = DistributedDataParallel(model)
    seen = []
    for (x, y), by_rank in zip(make_batches(len(factors)), factors, strict=True):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x[rank::2]), y[rank::2]) * by_rank[rank]
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        same = all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        seen.append((same, amp.state_dict()["loss_scaler0"]["loss_scale"]))
    return {"seen": seen, "parameters": [parameter.detach() for parameter in model.parameters()]}


def accumulate(rank: int, as_views: bool) -> list[Any]:
    """Two losses with scales of their own, whose gradients add up."""
    model = make_model()
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O1", num_losses=2)
    amp.load_state_dict({f"loss_scaler{number}": {"loss_scale": scale, "unskipped": 0} for number, scale in enumerate((64.0, 1024.0))})
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    for loss_id, (x, y) in enumerate(make_batches(2)):
        with amp.scale_loss(F.cross_entropy(parallel(x[rank::2]), y[rank::2]), optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
