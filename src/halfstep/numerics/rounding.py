"""What a rehearsal tells a trace: the results of an operation before and after they were rounded."""

from __future__ import annotations

import threading
from typing import Final, TypeAlias, final

from torch import Tensor

__all__ = ["Rounded", "Roundings", "roundings"]

# A result as it was computed, and the same after it was rounded.
Rounded: TypeAlias = tuple[Tensor, Tensor]


@final
class Roundings(threading.local):
    """What the operation that ran last in this thread has rounded.

    A rehearsal writes it and a trace reads it, so that neither has to know the other.

    Attributes:
        target: The device type that is rehearsed in this thread; empty where none is.
        watched: Whether a trace is open in this thread. Where it is not, nothing is noted, so that no tensor is kept alive.
        last: The pairs of the operation that ran last, for each result that was rounded.

    Example:
        >>> roundings.watched, roundings.last, roundings.target
        (False, (), '')
    """

    def __init__(self) -> None:
        self.target = ""
        self.watched = False
        self.last: tuple[Rounded, ...] = ()


roundings: Final = Roundings()


def rehearsed_target() -> str:
    """The device type that is rehearsed in this thread; empty where none is.

    Example:
        >>> rehearsed_target()
        ''
    """
    return roundings.target
