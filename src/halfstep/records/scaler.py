"""What a loss scaler has seen so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from halfstep.records.base import AbstractRecord

__all__ = ["ScalerStats"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerStats(AbstractRecord):
    """What a loss scaler has seen so far.

    Attributes:
        steps: Optimizer steps that were asked for, taken or skipped; with several optimizers, those of each.
        skips: How many of them were not taken, because gradients were not finite.
        consecutive_skips: Updates of the scaler, up to the last one, in a row that each saw a gradient which was not finite.
        scale: The loss scale now.

    Example:
        >>> stats = ScalerStats(steps=10, skips=2, consecutive_skips=0, scale=16384.0)
        >>> stats.steps - stats.skips
        8
    """

    steps: int
    skips: int
    consecutive_skips: int
    scale: float
