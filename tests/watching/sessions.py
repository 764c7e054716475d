"""Trainings that are watched, and what is read back of them."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.journal import read_run
from halfstep.records import StepRecord
from tests.watching.data import regression

__all__ = ["Session", "net", "norm_of", "records_of", "steps_in", "train"]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def records_of(folder: Path, train: Callable[[], object]) -> list[StepRecord]:
    with halfstep.watch(folder, sinks=["jsonl"]):
        train()
    return [*read_run(folder).records()]


def norm_of(parameters: Iterable[Tensor], scale: float = 1.0) -> float:
    """The reference, in float64."""
    return math.sqrt(sum(float((each.grad.double() / scale).square().sum()) for each in parameters if each.grad is not None))


class Session:
    """A scaled training."""

    def __init__(self, *, fused: bool = False, scale: float = 2.0**7, norm: bool = False) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=9)
        self.x, self.y = regression(6, 4, 1)
        self.norm = norm

    def step(self, *, fails: bool = False) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.model(self.x).float(), self.y)
        if fails:
            loss = loss * math.inf
        self.scaler.scale(loss).backward()
        if self.norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def clip_wrongly(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.x).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def train(folder: Path, steps: int, *, scale: float = 2.0**7, error: Exception | None = None, **settings: Any) -> Any:
    """A run of a session, and its watch."""
    session = Session(scale=scale)
    with halfstep.watch(folder, **{"sinks": ["jsonl"], **settings}) as seen:
        for _ in range(steps):
            session.step()
        if error is not None:
            raise error
    return seen


def steps_in(folder: Path) -> list[StepRecord]:
    return [*read_run(folder).records()]
