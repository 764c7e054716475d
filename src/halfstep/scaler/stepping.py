"""The step of an optimizer, taken or skipped by a verdict that may lie on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import steps_are_observed, supports_device_verdict
from halfstep.errors import ConfigurationError, InvalidTypeError

__all__ = ["identity_of", "leaves_verdict_on_device", "refuse_closure", "step_on_device"]


def leaves_verdict_on_device(optimizer: object) -> bool:
    """Whether an optimizer can be stepped without the host knowing whether the step will be taken.

    A fused optimizer can: its kernel reads the verdict on the device. It is told the verdict all the same

    - when somebody observes its `step()`, by a hook, a replaced method or that of a class derived from torch's: they would see a step that
      did not happen;
    - while a parameter that has a gradient has no state yet: a skipped first step would leave state behind, and momentum of SGD without
      a value.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> [leaves_verdict_on_device(torch.optim.SGD([weight], lr=0.1, fused=fused)) for fused in (False, True)]
        [False, True]
    """
    if not supports_device_verdict(optimizer) or not isinstance(optimizer, Optimizer):
        return False
    own_step = type(optimizer).step.__module__.startswith("torch.optim.")
    return own_step and not steps_are_observed(optimizer) and _has_all_state(optimizer)


def _has_all_state(optimizer: Optimizer) -> bool:
    state = optimizer.state
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue  # It keeps no state.
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            kept = state.get(parameter)
            if not kept or any(value is None for value in kept.values()):
                return False
    return True


def identity_of(optimizer: object) -> object:
    """What an optimizer and every wrapper round it have in common: its first parameter.

    Raises:
        InvalidTypeError: It has no parameters.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> identity_of(torch.optim.SGD([weight])) is weight
        True
    """
    groups = getattr(optimizer, "param_groups", None)
    first: object = next((parameter for group in groups for parameter in group["params"]), groups[0]) if groups else None
    if first is None:
        raise InvalidTypeError(f"A scaler takes an optimizer, or a wrapper round one that has its param_groups, not {optimizer!r:.80}.")
    return first


def step_on_device(optimizer: Optimizer, found_inf: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Has an optimizer step, or not, by a verdict that the host does not read.

    Args:
        optimizer: One that leaves its verdict on the device; its gradients are unscaled.
        found_inf: 0-dimensional float32 on the device of the gradients, 0 or 1.
        args: For `optimizer.step`.
        kwargs: For `optimizer.step`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.full((1,), torch.nan)
        >>> step_on_device(torch.optim.SGD([weight], lr=0.1, fused=True), torch.ones(()))
        >>> weight.item()
        1.0
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    # A user may have set a scale of their own beside the scaler's, as torch's scaler allows.
    optimizer.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses a closure among the arguments for an optimizer's step, however it is passed.

    Raises:
        ConfigurationError: There is one.

    Example:
        >>> refuse_closure((None,), {"closure": None})
    """
    if any(callable(value) for value in (*args, kwargs.get("closure"))):
        raise ConfigurationError(
            "scaler.step(optimizer, closure): a closure computes gradients that nobody unscales or checks. For LBFGS, SAM and their like "
            "use halfstep.MixedPrecision(...).train_step(fn, *batch), which does both in each evaluation."
        )
