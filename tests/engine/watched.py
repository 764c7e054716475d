"""Runs of an engine that skips, and all that they leave behind: what finding out why must not change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep import LossScaler, MixedPrecision
from halfstep.errors import HalfstepWarning
from halfstep.randomness import seed_everything
from tests.engine.loops import OPTIMIZERS, same_state

__all__ = ["CAUSES", "STORY", "Watched", "compare", "overflowing_line"]

INF = float("inf")


class Wide(nn.Module):
    """What overflows in fp16, and not in fp32, where its factor is large."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        large = self.up(x) * factor  # here: overflows
        result: Tensor = self.norm(large)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.drop, self.head = Wide(), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        hidden = self.drop(self.wide(x, factor))
        result: Tensor = self.head(hidden)
        return result


# The steps of a run: a letter for each, lowercase for a healthy one. F breaks in the forward pass, M in fp32 as well, D has bad data.
FACTORS = {".": (1.0, 1.0, 0.0), "F": (1e6, 1.0, 0.0), "M": (1.0, 0.0, 0.0), "D": (1.0, 1.0, INF)}
CAUSES = {"F": "forward", "M": "model", "D": "data"}
STORY = "..FFFF.F.FFF."


class Watched:
    """A run of an engine, and everything that it leaves behind."""

    def __init__(
        self,
        *,
        precision: str = "fp16",
        optimizer: Callable[[Net], Any] = lambda model: OPTIMIZERS["adamw"](model.parameters()),
        diagnose_after: int | None = None,
        scheduled: bool = True,
        **settings: Any,
    ) -> None:
        seed_everything(4)
        self.model = Net()
        made = optimizer(self.model)
        optimizers = [*made] if isinstance(made, list) else [made]
        self.log: list[Any] = []
        for each in optimizers if scheduled else []:  # A fused step that nobody observes leaves its verdict on the device.
            each.register_step_pre_hook(lambda *_: self.log.append("before"))
            each.register_step_post_hook(lambda *_: self.log.append("after"))
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers] if scheduled else []
        if scheduled:
            settings["on_step"] = lambda record: self.log.append(record.step)
            settings["scheduler"] = self.schedulers
        if "fp16" in precision:
            settings.setdefault("scaler", LossScaler(init_scale=2.0**8, growth_interval=3, max_consecutive_skips=None))
        self.optimizers = optimizers
        self.amp = MixedPrecision(self.model, made, precision, diagnose_after=diagnose_after, **settings)
        self.generator = torch.Generator().manual_seed(11)
        self.told: list[str] = []
        self.causes: list[str] = []

    def batch(self, bad: float = 0.0) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(6, 5, generator=self.generator), torch.randint(0, 3, (6,), generator=self.generator)
        x[1, 2] += bad
        return x, y

    def loss(self, x: Tensor, y: Tensor, factor: float, last: float) -> Tensor:
        noise = 1.0 + 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss: Tensor = nn.functional.cross_entropy(self.amp.model(x, factor).float() * noise, y) / torch.full((), last)
        return loss

    def train_step(self, x: Tensor, y: Tensor, factor: float, last: float) -> None:
        self.log.append(self.amp.train_step(lambda x, y: self.loss(x, y, factor, last), x, y))

    def by_hand(self, x: Tensor, y: Tensor, factor: float, last: float) -> None:
        count = self.amp.accumulate
        for xs, ys in zip(x.chunk(count), y.chunk(count), strict=True):
            with self.amp.autocast():
                loss = self.loss(xs, ys, factor, last)
            self.amp.backward(loss)
            self.log.append(self.amp.step())

    def run(self, story: str, *, by_hand: bool = False) -> Any:
        step = self.by_hand if by_hand else self.train_step
        for letter in story:
            factor, last, bad = FACTORS[letter]
            x, y = self.batch(bad)
            before = self.amp.diagnosis
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step(x, y, factor, last)
            self.told += [str(each.message) for each in told if issubclass(each.category, HalfstepWarning)]
            if self.amp.diagnosis is not before:
                assert self.amp.diagnosis is not None
                self.causes.append(self.amp.diagnosis.cause)
            self.log.append([self._gradients(), deepcopy(self.model.state_dict())])
        return self.left()

    def _gradients(self) -> list[Tensor | None]:
        return [None if each.grad is None else each.grad.clone() for each in self.model.parameters()]

    def left(self) -> Any:
        scaler = self.amp.scaler
        return [
            self.model.state_dict(),
            [each.state_dict() for each in self.optimizers],
            [each.state_dict() for each in self.schedulers],
            None if scaler is None else scaler.state_dict(),
            self.amp.state_dict(),
            self._gradients(),
            [(each.step, each.loss, each.skipped, each.scale, each.lr) if hasattr(each, "skipped") else each for each in self.log],
            [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()],  # type: ignore[index]
        ]


def compare(story: str = STORY, *, after: int = 2, by_hand: bool = False, told: Sequence[str] | None = None, **settings: Any) -> Watched:
    """Runs the same with a diagnosis and without one, which must make no difference."""
    plain = Watched(**settings)
    expected = plain.run(story, by_hand=by_hand)
    watched = Watched(diagnose_after=after, **settings)
    found = watched.run(story, by_hand=by_hand)
    for mine, other in zip(found, expected, strict=True):
        assert same_state(mine, other)
    assert plain.told == []
    assert plain.amp.diagnosis is None
    causes = ["forward", "forward"] if told is None else list(told)
    assert watched.causes == causes, watched.told
    assert len(watched.told) == len(causes)
    return watched


def overflowing_line() -> int:
    """The number of the line in this file that overflows."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# here: overflows"))
    return number
