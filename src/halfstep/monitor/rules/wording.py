"""What alerts say alike."""

from __future__ import annotations

import math

__all__ = ["amount", "counted", "prefix", "share_text"]


def amount(value: float) -> str:
    """A number as a message shows it: whole ones whole, others with four digits.

    Example:
        >>> [amount(value) for value in (65536.0, 0.5, 1 / 3, 2.0**127, float("nan"))]
        ['65536', '0.5', '0.3333', '1.701e+38', 'NaN']
    """
    if math.isnan(value):
        return "NaN"
    return f"{value:.0f}" if abs(value) < 1e7 and value == int(value) else f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "step"), counted(3, "step")
        ('1 step', '3 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prefix(optimizer: str) -> str:
    """How a message begins that is about one of several optimizers; empty where there is one.

    Example:
        >>> prefix("discriminator"), prefix("")
        ('Optimizer discriminator: ', '')
    """
    return f"Optimizer {optimizer}: " if optimizer else ""


def share_text(part: int, whole: int) -> str:
    """A share in percent.

    Example:
        >>> share_text(7, 30)
        '23 %'
    """
    return f"{100 * part / whole:.0f} %"
