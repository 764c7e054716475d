"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, final

from typing_extensions import Self

from halfstep.records.base import AbstractRecord

__all__ = ["Precision", "ScalerUse", "StepRecord"]

Precision = Literal["fp32", "bf16", "fp16"]

ScalerUse = Literal["used", "unused", "none"]


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
        loss: The loss, unscaled: what the step's gradients are the gradients of. The engine averages it over the micro-batches; a loop of
            one's own divides, or does not, before it calls `backward`. NaN, too, where nothing
            is known of it.
        grad_norm: The L2 norm of all gradients after unscaling and before clipping; `None` when the engine does not clip, or when it is
            not known.
        lr: The learning rate of the first parameter group in this step.
        step_time_s: Host seconds from the start of the step's first forward to the end of `step()`; in a watched loop, since the end of
            the step before.
        memory_bytes: The high-water mark of the CUDA allocator so far, in bytes. In a watched loop on a CPU, the memory that the process
            holds. `None` where it is not known.
        precision: The precision that the step computed in.
        epoch: The number of the pass over the data, from 1; `None` where it is not known.
        optimizer: The name of the optimizer, where several take turns; empty where there is one.
        scaler: Whether a loss scaler that is switched on has a part in the step: `used`, `unused` where there is one and the step passes
            it by, `none`; `None` where it is not known.

    Example:
        >>> record = StepRecord(
        ...     step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
        ...     precision="bf16",
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
    epoch: int | None = None
    optimizer: str = ""
    scaler: ScalerUse | None = None

    @classmethod
    def deferred(cls, read: Callable[[], Mapping[str, Any]], **known: Any) -> Self:
        """A record whose missing fields are read from a device when one of them is first asked for.

        Args:
            read: Returns the value of every field that is not in `known`, by name. It is called once and then let go, with all that it
                holds; it is called again only when it raised.
            known: The fields whose values are at hand. One that has a default is not read.

        Raises:
            TypeError: A name in `known` is no field of the record. Where `read` leaves a field out, the error comes when it is read.

        Example:
            >>> record = StepRecord.deferred(lambda: {"loss": 0.25, "grad_norm": None}, step=1, skipped=False, scale=1.0, lr=0.1,
            ...     step_time_s=0.01, memory_bytes=None, precision="bf16")
            >>> record.loss
            0.25
        """
        names = cls.__dataclass_fields__.keys()
        if unknown := known.keys() - names:
            raise TypeError(f"StepRecord has no field {min(unknown)!r}")
        record = object.__new__(cls)
        filled = {**_DEFAULTS, **known}
        object.__setattr__(record, "_read", read if len(filled) < len(names) else dict)
        for name, value in filled.items():
            object.__setattr__(record, name, value)
        return record

    if not TYPE_CHECKING:  # a type checker that saw this method would let every misspelt attribute pass

        def __getattr__(self, name: str) -> Any:
            # Python comes here only for a slot that was never filled, so a record that was read costs nothing more.
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            _fill(self, self._read())
            return object.__getattribute__(self, name)


_DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in fields(StepRecord) if field.default is not MISSING}


def _fill(record: StepRecord, values: Mapping[str, Any]) -> None:
    """Puts what was read into the fields that are still empty, all of them or, when a value is missing, none."""
    empty = [field.name for field in fields(record) if not _is_filled(record, field.name)]
    left_out = [name for name in empty if name not in values]
    if left_out:
        raise TypeError(f"StepRecord.deferred(read, ...): read() gave no {', '.join(map(repr, left_out))}; it must give {empty}.")
    for name in empty:
        object.__setattr__(record, name, values[name])
    # The function may hold tensors on a device. `dict` in its place gives nothing, which is right for a thread that comes late.
    object.__setattr__(record, "_read", dict)


def _is_filled(record: StepRecord, name: str) -> bool:
    try:
        object.__getattribute__(record, name)
    except AttributeError:
        return False
    return True
