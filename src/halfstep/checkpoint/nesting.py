"""Optimizers that hold another one, as SAM is commonly written: the state of the inner one is in no `state_dict()` of the outer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from halfstep.checkpoint.fitting import Fitting
from halfstep.checkpoint.trees import copied

__all__ = ["fit_inner", "inner_states", "load_inner", "shared_groups"]


def inner_states(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizers that an optimizer holds know of each parameter, by the attribute that holds them."""
    return {name: inner.state_dict()["state"] for name, inner in _inner(optimizer).items()}


def _inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    return {name: held for name, held in vars(optimizer).items() if isinstance(held, Optimizer) and held.state is not optimizer.state}


def fit_inner(optimizer: Optimizer, saved: Mapping[str, Any], *, part: str, fitting: Fitting) -> dict[str, Any]:
    """What to load into the optimizers that an optimizer holds.

    Raises:
        CheckpointError: It holds others than it did, unless that was allowed.
    """
    own = _inner(optimizer)
    if list(own) != list(saved):
        there, here = (", ".join(names) or "none" for names in (saved, own))
        fitting.object(
            f"The {part} held other optimizers in the checkpoint, by the names {there}, than in this run: {here}.",
            instead="the state of those that only one of the two has is left out",
        )
    return {
        name: {"state": copied(saved[name]), "param_groups": inner.state_dict()["param_groups"]}
        for name, inner in own.items()
        if name in saved
    }


def load_inner(optimizer: Optimizer, states: Mapping[str, Any], *, shared: Mapping[str, bool], undo: ExitStack) -> None:
    """Loads them, once the outer one is loaded.

    Args:
        optimizer: The outer one.
        states: As from `fit_inner`.
        shared: Which of them have the outer one's parameter groups for theirs.
        undo: Takes what puts them back.
    """
    for name, state in states.items():
        inner: Optimizer = getattr(optimizer, name)
        undo.callback(setattr, inner, "param_groups", inner.param_groups)
        undo.callback(setattr, inner, "state", inner.state)
        inner.load_state_dict(state)
        if shared[name]:
            inner.param_groups = optimizer.param_groups


def shared_groups(optimizer: Optimizer) -> dict[str, bool]:
    """For each optimizer that an optimizer holds, whether their parameter groups are the same objects."""
    return {
        name: len(held.param_groups) == len(optimizer.param_groups)
        and all(one is other for one, other in zip(held.param_groups, optimizer.param_groups, strict=True))
        for name, held in _inner(optimizer).items()
    }
