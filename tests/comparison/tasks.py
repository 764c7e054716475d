"""Tiny tasks, and a clock that only they move."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.comparison import contender
from halfstep.comparison.contender import Contender, RunOptions
from halfstep.records import Precision
from halfstep.task import Task, TaskFactory

__all__ = ["CPU", "Clock", "Loss", "current_precision", "make", "make_factory", "noisy_task", "options", "vanishing_task"]

CPU = torch.device("cpu")

Loss = Callable[[Any, Any], Any]


def current_precision() -> str:
    """What autocast is doing right now."""
    if not torch.is_autocast_enabled("cpu"):
        return "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[torch.get_autocast_dtype("cpu")]


def options(**changes: Any) -> RunOptions:
    values: dict[str, Any] = {"device": CPU, "channels_last": False, "compile": False, "loss_scaling": True}
    return RunOptions(**(values | changes))


def make(factory: TaskFactory, precision: Precision = "fp32", seed: int = 0, **changes: Any) -> Contender:
    return Contender(factory, precision=precision, seed=seed, options=options(**changes))


def square(model: Any, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def make_factory(
    loss: Loss = square,
    *,
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 2),
    batches: Callable[[], Iterable[Any]] = lambda: [torch.randn(8, 4) for _ in range(3)],
    lr: float = 0.1,
) -> TaskFactory:
    """A factory of tasks that train one linear layer to give zero."""

    def task(seed: int) -> Task:
        torch.manual_seed(seed)
        made = model()
        return Task(model=made, optimizer=torch.optim.SGD(made.parameters(), lr=lr), loss=loss, batches=batches())

    return task


class Noise(torch.utils.data.Dataset[Tensor]):
    """Samples that come from all three generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4) + random.random() + np.random.rand() + index


def noisy_task(seed: int) -> Task:
    """Draws from every global generator wherever a task can: dropout, a shuffled loader, its samples, and the loss."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    loader = torch.utils.data.DataLoader(Noise(), batch_size=4, shuffle=True)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).square().mean() * (1 + random.random() + np.random.rand())
        return out

    return Task(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=loss, batches=loader)


def vanishing_task(seed: int) -> Task:
    """A classifier whose gradients are below what fp16 can hold, unless the loss is scaled."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * 1e-7

    optimizer = torch.optim.SGD(model.parameters(), lr=5e6)
    return Task(model=model, optimizer=optimizer, loss=loss, batches=[(x[:32], y[:32]), (x[32:], y[32:])])


@final
@dataclass(slots=True)
class Clock:
    """Time that passes only when a step says so: `costs` seconds in each precision.

    `steps` notes which precision ran, step by step.
    """

    costs: dict[str, float] = field(default_factory=lambda: {"fp32": 1.0, "bf16": 0.5, "fp16": 4.0})
    now: float = 0.0
    steps: list[str] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the comparison read this clock, and nothing else."""
        monkeypatch.setattr(contender, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """A loss that takes its time."""
        precision = current_precision()
        self.steps.append(precision)
        self.now += self.costs[precision]
        return square(model, batch)
