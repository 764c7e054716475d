"""The policy of an engine: as the user gave it, as it means here, and on the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.casting import Region
from halfstep.errors import InvalidTypeError
from halfstep.policy import Policy, PolicyHandle, attach_policy
from halfstep.precision import PRECISIONS
from halfstep.records import Precision

__all__ = ["attach", "scaled_precision", "settle_policy"]


def settle_policy(precision: str | Policy, *, device: torch.device) -> tuple[Policy, str]:
    """The policy that an engine was asked for, with its default precision known; and that precision as it was asked for.

    Args:
        precision: A policy, or the text of one; `auto` or a precision alone is one without overrides.
        device: The model's, by which `auto` is settled.

    Raises:
        InvalidTypeError: It is neither a policy nor a string.
        ConfigurationError: The text is no policy.
    """
    given: Any = precision
    if not isinstance(given, str | Policy):
        raise InvalidTypeError(
            f"A precision is a halfstep.Policy, or is named by a string, one of auto, {', '.join(PRECISIONS[:-1])} and {PRECISIONS[-1]}, "
            f"not {given!r}."
        )
    policy = Policy.parse(given) if isinstance(given, str) else given
    return policy.resolve(device), policy.default


def scaled_precision(policy: Policy) -> Precision:
    """The precision that decides about loss scaling: fp16 where any part runs in it, and the default elsewhere."""
    return "fp16" if "fp16" in policy.precisions else policy.resolved


def attach(policy: Policy, model: nn.Module) -> tuple[PolicyHandle | None, Region]:
    """Applies an engine's policy to its model, where it has more to say than autocast does.

    Returns:
        The handle by which it is removed, `None` where there was nothing to apply, and the region for forward pass and loss.

    Raises:
        ConfigurationError: An override is about nothing in the model, or a policy is applied to it already.
    """
    if not policy.overrides and not policy.pure:
        return None, Region(precision=policy.resolved)
    handle = attach_policy(policy, model, everywhere=False)
    return handle, handle.region
