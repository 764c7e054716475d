"""A task that breaks in fp16: attention whose scores are divided by the root of their size only after they have overflowed.

    halfstep diagnose examples/overflowing_attention.py:task --target cuda

The weights are those of a model that was trained in bf16: its activations are large, which bf16 does not mind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep


class Attention(nn.Module):
    """Self-attention with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.layers = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attention(self.norm1(x))
        deeper: Tensor = x + self.layers(self.norm2(x))
        return deeper


def task(seed: int) -> halfstep.Task:
    """Four blocks that classify sequences; the attention of the third has large weights."""
    torch.manual_seed(seed)
    blocks = [Block(64) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 5))
    with torch.no_grad():
        blocks[2].attention.query.weight.mul_(90.0)
        blocks[2].attention.key.weight.mul_(90.0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).mean(1), y)

    return halfstep.Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss=loss,
        batches=[(torch.randn(8, 16, 8), torch.randint(5, (8,))) for _ in range(8)],
    )
