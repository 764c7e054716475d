"""Loss scaling: torch's own GradScaler, and exact knowledge of which steps it skipped."""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch.optim import Optimizer

__all__ = ["StepProbe"]


@final
class StepProbe:
    """An optimizer as a GradScaler sees it: it passes `step()` on, and notes that it was called.

    A scaler calls the optimizer's `step()` only when all gradients are finite. "The scale went down" is no proof of a skip (it does not
    at a floor, nor after `update(new_scale)`), and a fused optimizer's `step()` is called either way; this object has no
    `_step_supports_amp_scaling`, so the scaler decides for a fused optimizer as it does for any other.

    State in a scaler is kept by the identity of the object that it was given: give it this one each time.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> scaler, probe = torch.amp.GradScaler("cpu", init_scale=2.0), StepProbe(torch.optim.SGD([weight], lr=0.1))
        >>> scaler.scale(weight * torch.inf).backward()
        >>> probe.step_with(scaler), weight.item()
        (False, 1.0)
    """

    __slots__ = ("_optimizer", "_stepped")

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; the scaler unscales their gradients."""
        return self._optimizer.param_groups

    def step(self) -> None:
        """Steps the optimizer and notes it. For the scaler to call."""
        self._stepped = True
        self._optimizer.step()

    def unscale_with(self, scaler: torch.amp.GradScaler) -> None:
        """Divides the gradients by the scale and checks that they are finite."""
        scaler.unscale_(self._as_optimizer())

    def step_with(self, scaler: torch.amp.GradScaler) -> bool:
        """Takes the step unless a gradient is not finite, and returns whether it was taken."""
        self._stepped = False
        scaler.step(self._as_optimizer())
        return self._stepped

    def _as_optimizer(self) -> Optimizer:
        # A scaler uses nothing of an optimizer but `param_groups` and `step`.
        return cast("Optimizer", self)
