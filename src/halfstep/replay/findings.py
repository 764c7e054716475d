"""What an examination found, before it becomes a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from halfstep.records import Cause, Deviation, NonFiniteTensor, OpRecord, Remedy, StuckTensor, VanishedGradients

__all__ = ["Finding"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with a step, why, and what helps. The attributes are those of `Diagnosis`."""

    cause: Cause
    loss: float
    explanation: str
    origin: OpRecord | None = None
    first_nan: OpRecord | None = None
    remedies: tuple[Remedy, ...] = ()
    passing_scale: float | None = None
    is_reproduced: bool = True
    tensors: tuple[NonFiniteTensor, ...] = ()
    deviation: Deviation | None = None
    vanished: tuple[VanishedGradients, ...] = ()
    stuck: tuple[StuckTensor, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether it is more than a loss scale that is too high."""
        return self.cause not in ("healthy", "scale")
