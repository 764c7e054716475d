"""Tiny tasks whose steps break when they are told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep import Task
from halfstep.records import Diagnosis
from halfstep.task import TaskFactory

__all__ = ["BREAKING", "Net", "Wide", "diagnose", "factored", "factory", "line_that_breaks", "loss_of"]

# With this factor a product is beyond fp16, and far from the end of fp32.
BREAKING = 1e6


class Wide(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        large: Tensor = self.up(x) * factor  # here: breaks
        return large


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.drop, self.head = Wide(), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x: Tensor, factor: Any = 1.0) -> Tensor:
        result: Tensor = self.head(self.drop(self.norm(self.wide(x, factor))))
        return result


def line_that_breaks() -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# here: breaks"))
    return number


def loss_of(model: Any, batch: Any) -> Tensor:
    x, factor = batch
    loss: Tensor = model(x, float(factor)).float().square().mean()
    return loss


def factored(*factors: float) -> list[Any]:
    """Batches with the factors that they are computed with."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 4, generator=generator), torch.tensor(factor)) for factor in factors]


def factory(
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    model: Callable[[], nn.Module] = Net,
    loss: Callable[[Any, Any], Tensor] = loss_of,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.01),
) -> TaskFactory:
    def task(seed: int) -> Task:
        torch.manual_seed(seed)
        made = model()
        given = batches() if callable(batches) else batches
        return Task(model=made, optimizer=optimizer([*made.parameters()]), loss=loss, batches=given)

    return task


def diagnose(task: Any, **settings: Any) -> Diagnosis:
    """A diagnosis for CUDA, of a few steps."""
    if not {"target", "device", "model"} & set(settings):
        settings["target"] = "cuda"
    settings.setdefault("max_steps", 3)
    return halfstep.diagnose(task, **settings)
