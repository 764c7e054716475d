"""Which tensors are known to be finite, by the memory that they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from torch import Tensor

from halfstep._torch import dense_parts
from halfstep._torch.tracing import hold_storage, release_storages, storage_key, storage_keys, untraced
from halfstep.numerics.ranges import FINITE, Extent, Ranges, covers_memory, reads_at_once

__all__ = ["Finiteness"]

_NONE: Final[tuple[Extent, ...]] = ()


@final
class Finiteness:
    """Tells for the inputs of operations whether they are finite, from what is known of the operations that made them.

    It is known for each piece of memory as a whole, so a view is as finite as all that it is a view of. Where that is not finite and lies
    on the CPU, the view itself is read to be exact; on a device the view of a tensor that is not finite counts as not finite.

    Tensors from outside of the trace are read when they are first used. What is written to them after that is seen, as all operations
    are; what another thread, NumPy or a kernel writes without saying so is not, unless `forget` is called.

    Args:
        ranges: What measures.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._known: dict[int | None, Extent] = {}
        self._held: list[int] = []

    def suspects(self, tensors: Sequence[Tensor]) -> tuple[Extent, ...]:
        """The extents of the tensors that may not be finite, before an operation runs on them."""
        known = self._known
        keys = storage_keys(tensors)
        for key in keys:
            if known.get(key) is not FINITE:
                break
        else:
            return _NONE
        with untraced():
            extents = [self._judge(tensor, key) for tensor, key in zip(tensors, keys, strict=True) if known.get(key) is not FINITE]
        return tuple([each for each in extents if each.is_suspect])

    # All that follows has to be called inside of `untraced()`.

    def take(self, tensor: Tensor) -> float | Extent | None:
        """Measures a tensor that an operation has returned and has not written to before, as `Ranges.measure` does.

        Returns:
            `None` also where it lies in memory that something is known about, and hence is a view of what was there before.
        """
        key = storage_key(tensor)
        if key in self._known:
            return None
        reading = self._ranges.measure(tensor)
        if key is not None:
            self._held.append(hold_storage(tensor))
            self._known[key] = reading if isinstance(reading, Extent) else FINITE
        return reading

    def take_written(self, tensor: Tensor) -> float | Extent | None:
        """Measures what an operation has written to a tensor that was there before it."""
        reading = self._ranges.measure(tensor)
        key = storage_key(tensor)
        before = self._known.get(key)
        if before is not None:  # Otherwise it is a part of memory from outside, which is read whenever it is used.
            extent = reading if isinstance(reading, Extent) else FINITE
            if before is not FINITE and not covers_memory(tensor):
                extent = self._ranges.join(before, extent)
            self._known[key] = extent
        return reading

    def trust(self, tensor: Tensor) -> None:
        """Counts a new tensor as finite, such as memory that nobody has written to."""
        key = storage_key(tensor)
        if key is not None and key not in self._known:
            self._held.append(hold_storage(tensor))
            self._known[key] = FINITE

    def forget(self, tensor: Tensor) -> None:
        """Has a tensor read again when it is used, since something was written to it that was not read."""
        self._known.pop(storage_key(tensor), None)

    def close(self) -> None:
        """Forgets everything."""
        self._known.clear()
        release_storages(self._held)
        self._held.clear()

    def _judge(self, tensor: Tensor, key: int | None) -> Extent:
        if key is None:
            return self._whole(dense_parts(tensor))
        extent = self._known.get(key)
        is_all = covers_memory(tensor)
        if extent is not None and (is_all or not reads_at_once(tensor)):
            return extent
        reading = self._ranges.measure(tensor)
        measured = reading if isinstance(reading, Extent) else FINITE
        if extent is None and is_all:  # What is known of a part says nothing of the rest of that memory.
            self._held.append(hold_storage(tensor))
            self._known[key] = measured
        return measured

    def _whole(self, parts: Iterable[Tensor]) -> Extent:
        extent = FINITE
        for part in parts:
            reading = self._ranges.measure(part)
            if isinstance(reading, Extent):
                extent = self._ranges.join(extent, reading)
        return extent
