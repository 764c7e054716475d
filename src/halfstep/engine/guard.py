"""A step by hand, in the middle of an engine's step, is refused before it does harm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final
from weakref import WeakKeyDictionary, finalize

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import StepOrderError

__all__ = ["StepGuard", "is_driven", "times_driven"]


@final
class StepGuard:
    """Refuses `optimizer.step()` while gradients wait for the engine to step with them: they may be scaled, and would be used twice.

    It hangs on the optimizers as a hook for as long as the engine lives. Every other step by hand is none of its business.

    Args:
        optimizers: The engine's.
        owner: The engine, or a part of it that lives as long.
    """

    # A fused optimizer's step is called whether it is taken or not; hooks that count steps must not see that. This one does not count.
    observes_steps = False

    def __init__(self, optimizers: Sequence[Optimizer], *, owner: object) -> None:
        self._waiting = False
        handles = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # An optimizer that never called Optimizer.__init__ takes no hooks.
                handle = optimizer.register_step_pre_hook(self)
                if (earlier := _GUARDS.get(optimizer)) is not None:
                    earlier.remove()  # Of an engine that was left, perhaps in the middle of a step.
                _GUARDS[optimizer] = handle
                _taken[0] += 1
                handles.append(handle)
        finalize(owner, _remove, handles).atexit = False

    def arm(self) -> None:
        """Gradients wait."""
        self._waiting = True

    def disarm(self) -> None:
        """The engine is about to step, or has let go of its gradients."""
        self._waiting = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Is called by the optimizer before each step."""
        if self._waiting:
            raise StepOrderError(
                f"{type(optimizer).__name__}.step() was called after amp.backward(): its gradients may be multiplied by the loss scale, "
                "and amp.step() would use them again. Call amp.step() in its place, which steps it unless a gradient is not finite."
            )


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_GUARDS: Final[WeakKeyDictionary[Optimizer, RemovableHandle]] = WeakKeyDictionary()

_taken: Final = [0]


def times_driven() -> int:
    """How often an engine has taken an optimizer: where that has not changed, none is driven that was not before."""
    return _taken[0]


def is_driven(optimizer: Optimizer) -> bool:
    """Whether an engine steps an optimizer, or did before it was left.

    Example:
        >>> import torch
        >>> is_driven(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        False
    """
    return optimizer in _GUARDS
