"""Thresholds of rules, checked."""

from __future__ import annotations

import math
from numbers import Integral, Real

from halfstep.errors import ConfigurationError, InvalidTypeError

__all__ = ["check_counts", "check_numbers"]


def check_counts(rule: object, **lowest: int) -> None:
    """Accepts thresholds that are whole numbers, and large enough.

    Args:
        rule: The rule that has them.
        lowest: The least that each of them may be, by name.

    Raises:
        InvalidTypeError: One is no whole number.
        ConfigurationError: One is too small.
    """
    for name, least in lowest.items():
        value = getattr(rule, name)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidTypeError(f"{type(rule).__name__}({name}=...) takes a whole number, not {value!r}.")
        if value < least:
            raise ConfigurationError(f"{type(rule).__name__}({name}={value!r}): allowed is a whole number from {least}.")


def check_numbers(rule: object, **bounds: float) -> None:
    """Accepts thresholds that are finite numbers above a bound.

    Args:
        rule: The rule that has them.
        bounds: What each of them must be greater than, by name.

    Raises:
        InvalidTypeError: One is no number.
        ConfigurationError: One is not finite, or too small.
    """
    for name, bound in bounds.items():
        value = getattr(rule, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidTypeError(f"{type(rule).__name__}({name}=...) takes a number, not {value!r}.")
        if not bound < float(value) < math.inf:  # NaN fails this, too.
            raise ConfigurationError(f"{type(rule).__name__}({name}={value!r}): allowed is a finite number above {bound:g}.")
