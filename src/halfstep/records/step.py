"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final

from typing_extensions import Self

from halfstep.records.base import AbstractRecord

__all__ = ["Precision", "StepRecord"]

Precision = Literal["fp32", "bf16", "fp16"]


class _DeferredSlots:
    """A slot for the function that reads the values which still lie on a device."""

    __slots__ = ("_read",)

    _read: Callable[[], Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(AbstractRecord, _DeferredSlots):
    """What one optimizer step did.

    Values that lie on an accelerator when the step ends are read when one of them is first asked for: until then the step costs no
    host-device synchronization. Nothing else about the record can change.

    Attributes:
        step: The number of this step, counted from 1; skipped steps count too.
        skipped: Whether the optimizer step was not taken because gradients were non-finite.
        scale: The loss scale that this step's gradients were computed with; 1.0 where no loss scaling is used.
        loss: The loss, unscaled, averaged over the micro-batches of this step.
        grad_norm: The L2 norm of all gradients after unscaling and before clipping; `None` when the engine does not clip.
        lr: The learning rate of the first parameter group in this step.
        step_time_s: Host seconds from the start of the step's first forward to the end of `step()`.
        memory_bytes: The high-water mark of the CUDA allocator so far, in bytes; `None` on devices that do not keep one.
        precision: The precision that the step computed in.

    Example:
        >>> record = StepRecord(
        ...     step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None, precision="bf16"
        ... )
        >>> StepRecord.from_json(record.to_json()) == record
        True
    """

    step: int
    skipped: bool
    scale: float
    loss: float
    grad_norm: float | None
    lr: float
    step_time_s: float
    memory_bytes: int | None
    precision: Precision

    @classmethod
    def deferred(cls, read: Callable[[], Mapping[str, Any]], **known: Any) -> Self:
        """A record whose missing fields are read from a device when one of them is first asked for.

        Args:
            read: Returns the value of every field that is not in `known`; called once at most.
            known: The fields whose values are at hand.

        Raises:
            TypeError: A name in `known` is no field of the record.
        """
        unknown = set(known) - {field.name for field in fields(cls)}
        if unknown:
            raise TypeError(f"StepRecord has no field {sorted(unknown)[0]!r}")
        record = object.__new__(cls)
        object.__setattr__(record, "_read", read)
        for name, value in known.items():
            object.__setattr__(record, name, value)
        return record

    def __getattr__(self, name: str) -> Any:
        # Python comes here only for a slot that was never filled, so a record that was read costs nothing more.
        if name == "_read" or name not in self.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for field, value in self._read().items():
            object.__setattr__(self, field, value)
        return object.__getattribute__(self, name)
