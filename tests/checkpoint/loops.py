"""Scalers and engines that are led through finite and infinite gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.engine import MixedPrecision
from halfstep.scaler import LossScaler

INF = float("inf")
BEFORE, AFTER = [1.0, INF, 1.0, 1.0], [1.0, INF, 1.0, 1.0, 1.0, float("nan"), 1.0]
GROWTH = 3
# That of a run which has gone on for a while.
STATE = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": GROWTH, "_growth_tracker": 2}

Target = MixedPrecision | torch.amp.GradScaler
KINDS: dict[str, Callable[..., torch.amp.GradScaler]] = {"LossScaler": LossScaler, "GradScaler": torch.amp.GradScaler}
TARGETS = [*KINDS, "engine", "engine with a GradScaler"]


def scaler(**settings: float) -> torch.amp.GradScaler:
    """One of torch's, whose scale grows soon."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": GROWTH, **settings})  # type: ignore[arg-type]


def follow(scaler: torch.amp.GradScaler, factors: Sequence[float]) -> list[tuple[float, int]]:
    """Takes a step with a gradient of each size, and gives the scale and the growth tracker after it."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen = []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(weight * factor).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"]))
    return seen


def engine(precision: str = "fp16", **settings: Any) -> MixedPrecision:
    model = nn.Linear(1, 1, bias=False)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **settings)


def target(name: str, **settings: Any) -> Target:
    settings = {"growth_interval": GROWTH, **settings}
    if name in KINDS:
        return KINDS[name]("cpu", **settings)
    return engine(scaler=KINDS["GradScaler" if "Grad" in name else "LossScaler"]("cpu", **settings))


def scaler_of(made: Target) -> torch.amp.GradScaler:
    inner = made.scaler if isinstance(made, MixedPrecision) else made
    assert inner is not None
    return inner


def followed(made: Target, factors: list[float]) -> list[tuple[float, int]]:
    """The same steps with a scaler alone and with an engine."""
    if not isinstance(made, MixedPrecision):
        return follow(made, factors)
    seen = []
    for factor in factors:
        made.train_step(lambda x, factor=factor: made.model(x).float().sum() * factor, torch.ones(1, 1))
        state = scaler_of(made).state_dict()
        seen.append((state["scale"], state["_growth_tracker"]))
    return seen


def theirs(factors: list[float] | None = None, **settings: float) -> torch.amp.GradScaler:
    """A scaler that was on its way when it was saved."""
    made = scaler(**settings)
    follow(made, BEFORE if factors is None else factors)
    return made
