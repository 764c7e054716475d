"""The one step of an optimizer that is skipped after an overflow, and the one that must not be taken at all."""

from __future__ import annotations

import functools
import types
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigurationError, StepOrderError

__all__ = ["StepGuard"]


@final
class _SkippedStepError(Exception):
    """Ends a step before it changes anything. It never leaves this module."""


@final
class StepGuard:
    """Stands before each step of one optimizer, as a hook.

    Attributes:
        scale: What its gradients are multiplied by, 0-dimensional, where a loss was scaled with `delay_unscale=True`; `None` otherwise.
        unchecked: What was found in gradients that were unscaled with `delay_overflow_check=True`: 0-dimensional, 1 for an overflow.
    """

    # For whoever asks whether a step that is not taken would be seen by somebody: not by this one.
    observes_steps: ClassVar[bool] = False

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.unchecked: Tensor | None = None
        self._skips = False
        self._ends = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch at the beginning of each step."""
        if self._ends:
            raise _SkippedStepError
        if self.scale is not None and any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            raise StepOrderError(
                "optimizer.step() was called while its gradients were multiplied by the loss scale: the last amp.scale_loss had "
                "delay_unscale=True. Leave it out in the last backward pass before a step."
            )

    def check_scale(self, scale: Tensor) -> None:
        """Accepts a scale that goes with the gradients that are still scaled, if there are any.

        Raises:
            StepOrderError: They were computed with another one.
        """
        if self.scale is not None and not torch.equal(self.scale, scale.to(self.scale.device)):
            raise StepOrderError(
                f"Gradients that were computed with delay_unscale=True are multiplied by {self.scale.item():g}, and the loss scale is now "
                f"{scale.item():g}: they cannot be added up. Leave out delay_unscale, which is never necessary, or use it for all losses "
                "of an iteration with the same loss_id."
            )

    def skip_next(self, optimizer: Optimizer) -> None:
        """Has the next call of `optimizer.step()` do nothing; the one after it is a step again.

        A learning-rate scheduler put its own function round the step, by which it knows that `step()` was called. That function is called,
        and ended by the hook before anything happens, so that the scheduler does not warn of a missing step.
        """
        if self._skips:
            return
        self._skips = True
        before = vars(optimizer).get("step")
        original = optimizer.step

        @functools.wraps(original)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._skips:  # Somebody put a function round this one, so that it could not be taken away.
                return original(*args, **kwargs)
            self._skips = False
            if vars(optimizer).get("step") is replaced:
                _restore(optimizer, before)
            if any(callable(value) for value in (*args, kwargs.get("closure"))):
                raise ConfigurationError(
                    "optimizer.step(closure): the step is to be skipped, since a gradient overflowed, but a closure would compute others. "
                    "As in Apex, closures do not go with scale_loss. For LBFGS and its like use halfstep.MixedPrecision(...).train_step."
                )
            if before is not None:
                self._pass_through(original)
            return None

        replaced = types.MethodType(step, optimizer)
        optimizer.step = replaced  # type: ignore[method-assign]

    def _pass_through(self, original: Any) -> None:
        self._ends = True
        try:
            original()
        except _SkippedStepError:
            pass
        finally:
            self._ends = False


def _restore(optimizer: Optimizer, before: Any) -> None:
    if before is None:
        del optimizer.step
    else:
        optimizer.step = before  # type: ignore[method-assign]
