"""Optimizers that compute gradients several times in one step, such as LBFGS and SAM."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ClosureKind", "NonFiniteGradientError", "OptimizerSnapshot", "closure_kind", "step_with_closure"]

ClosureKind = Literal["none", "all", "further"]


@final
class NonFiniteGradientError(Exception):
    """Raised inside of an optimizer's step to leave it; it never reaches the user."""


def closure_kind(optimizers: Sequence[Optimizer], *, closure: bool) -> ClosureKind:
    """Which gradients the optimizer asks a closure for: `none`; `all`, as LBFGS; or `further` ones than the first, as SAM.

    Args:
        optimizers: Those that step together.
        closure: Whether the user says that it takes one for further gradients; some that do cannot be called without.
    """
    if closure and not isinstance(optimizers[0], torch.optim.LBFGS):
        return "further"
    parameter = inspect.signature(optimizers[0].step).parameters.get("closure")
    return "all" if parameter is not None and parameter.default is inspect.Parameter.empty else "none"


def step_with_closure(optimizer: Optimizer, evaluate: Callable[[], Tensor], *, kind: ClosureKind) -> bool:
    """Takes a step, or puts everything back when gradients turn out not to be finite in the middle of it.

    Args:
        optimizer: It.
        evaluate: Computes gradients and returns the loss; raises `NonFiniteGradientError`.
        kind: Which gradients the optimizer asks for.

    Returns:
        Whether the step was skipped.
    """
    before = OptimizerSnapshot(optimizer)
    try:
        if kind == "further":
            evaluate()
        optimizer.step(evaluate)  # type: ignore[arg-type]
    except BaseException as error:
        before.restore()
        if isinstance(error, NonFiniteGradientError):
            return True
        raise
    return False


@final
class OptimizerSnapshot:
    """The parameters of an optimizer and its state, with those of the optimizers that it is made of, as SAM's is."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizers = list(_with_inner(optimizer))
        parameters = {id(parameter): parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]}
        self._values = [(parameter, parameter.detach().clone()) for parameter in parameters.values()]
        self._states = [_copied(each.state) for each in self._optimizers]
        self._groups = [[{**group} for group in each.param_groups] for each in self._optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all of it back."""
        for parameter, value in self._values:
            parameter.copy_(value)
        for optimizer, state, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                group.clear()  # A step may have written what was not there.
                group.update(saved)


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield value


def _copied(state: Any) -> dict[Any, Any]:
    # The keys are the parameters themselves.
    return {key: copy.deepcopy(value) for key, value in state.items()}
