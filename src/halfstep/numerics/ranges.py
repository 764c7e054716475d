"""The range of the values in a tensor: its largest magnitude, what is not finite, and what a rounding lost."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

__all__ = ["FINITE", "Extent", "Flush", "PendingReads", "Ranges", "Reading", "covers_memory", "dtype_name", "narrows"]

# The dtypes whose values are read. Kernels know little of those with 8 bits.
_FORMATS: Final = {dtype: torch.finfo(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}

# The largest magnitude that is subnormal, for each of them.
_SUBNORMAL: Final = {dtype: each.smallest_normal * (1 - each.eps) for dtype, each in _FORMATS.items()}

# Up to here one pass that counts is faster than two that the processor runs on many values at once.
_FEW: Final = 16384

# Up to here a sum of ones in fp32 is exact.
_EXACT_ONES: Final = 2**24


@final
class Extent:
    """The range of the values of a tensor that may not be finite. Each number is a 0-d tensor for as long as it waits to be read.

    Attributes:
        absmax: The largest magnitude; inf where a value is infinite; NaNs are left out.
        nonfinite: How many values are infinite or NaN.
        nans: How many are NaN.
    """

    __slots__ = ("absmax", "nans", "nonfinite")

    def __init__(self, absmax: Any, *, nonfinite: Any, nans: Any) -> None:
        self.absmax = absmax
        self.nonfinite = nonfinite
        self.nans = nans

    @property
    def is_suspect(self) -> bool:
        """Whether a value may be infinite or NaN, as far as can be told now."""
        return self is not FINITE


# Of what holds no values that are infinite or NaN.
FINITE: Final = Extent(0.0, nonfinite=0, nans=0)

# The range of a tensor: its largest magnitude where it is known to be finite, and all numbers elsewhere.
Reading: TypeAlias = float | Extent


@final
class Flush:
    """How many values a rounding lost.

    Attributes:
        count: The values that were not zero and became zero or subnormal; a 0-d tensor until it is read.
    """

    __slots__ = ("count",)

    def __init__(self, count: Any) -> None:
        self.count = count


@final
class PendingReads:
    """Numbers that wait on a device, read all at once at the end, since each read would have to wait for the device.

    Example:
        >>> reads, extent = PendingReads(), Extent(torch.tensor(2.0), nonfinite=0, nans=0)
        >>> reads.add(extent, "absmax")
        >>> reads.settle()
        >>> extent.absmax
        2.0
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, str, Tensor]] = []

    def add(self, holder: object, name: str) -> None:
        """Has the number in an attribute of an object read at the end. One that is a number already is left alone."""
        value = getattr(holder, name)
        if isinstance(value, Tensor):
            self._waiting.append((holder, name, value))

    def settle(self) -> None:
        """Puts plain numbers in place of all that wait."""
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[Any, str, Tensor]]] = {}
        for each in self._waiting:
            groups.setdefault((each[2].device, each[2].dtype), []).append(each)
        self._waiting.clear()
        for device in {device for device, _ in groups if device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # The backward pass may have measured on streams of its own.
        for group in groups.values():
            numbers = torch.stack([tensor for _, _, tensor in group]).tolist()
            for (holder, name, _), number in zip(group, numbers, strict=True):
                setattr(holder, name, number)


@final
class Ranges:
    """Measures tensors: those of the CPU at once, others on their device without waiting for it.

    All of its methods have to be called inside of `untraced()`.
    """

    def __init__(self) -> None:
        self.pending = PendingReads()

    def measure(self, tensor: Tensor) -> Reading | None:
        """The range of a tensor's values, of a complex one that of its parts; `None` for one without any that can be read."""
        if tensor.dtype not in _FORMATS or tensor.layout is not torch.strided or not tensor.numel():
            return self.measure(torch.view_as_real(tensor.resolve_conj())) if _has_parts(tensor) else None
        try:
            if not tensor.is_cpu:
                return None if tensor.is_meta else self._measured_later(tensor)
            low, high = torch.aminmax(tensor)
        except RuntimeError:  # Such as a nested tensor, or one that has no memory although it is said to be on the CPU.
            return None
        bottom, top = -low.item(), high.item()
        absmax = top if top > bottom else bottom
        return abs(absmax) if absmax < torch.inf else _counted(tensor)

    def _measured_later(self, tensor: Tensor) -> Extent:
        low, high = torch.aminmax(torch.nan_to_num(tensor, nan=0.0, posinf=torch.inf, neginf=-torch.inf))
        # What is not finite leaves NaN where it is taken away from itself.
        extent = Extent(torch.maximum(-low, high), nonfinite=(tensor - tensor).ne(0).sum(), nans=tensor.ne(tensor).sum())
        for name in ("absmax", "nonfinite", "nans"):
            self.pending.add(extent, name)
        return extent

    def join(self, first: Extent, second: Extent) -> Extent:
        """One for two pieces of memory. Whether its counts are zero is all that they tell."""
        if first is FINITE or second is FINITE:
            return second if first is FINITE else first
        both = Extent(second.absmax, nonfinite=first.nonfinite + second.nonfinite, nans=first.nans + second.nans)
        for name in ("nonfinite", "nans"):
            self.pending.add(both, name)
        return both

    def flushed(self, source: Tensor, result: Tensor) -> Flush | None:
        """How many values of a tensor that are not zero are zero or subnormal in the result that they were rounded to.

        Args:
            source: Floating-point.
            result: Its values in another dtype; as many, or a multiple where they were repeated.
        """
        if result.dtype not in _FORMATS or source.dtype not in _FORMATS or not source.numel() or result.is_meta:
            return None
        if reads_at_once(result) and _is_normal(result):
            return None
        # Where the result is neither zero nor subnormal, the source was not zero either; so the difference of two counts is exact.
        repeats = result.numel() // source.numel()
        flush = Flush(_nonzeros(source) * repeats - _nonzeros(torch.hardshrink(result, _SUBNORMAL[result.dtype])))
        if not (reads_at_once(source) and reads_at_once(result)):
            self.pending.add(flush, "count")
        return flush


def reads_at_once(tensor: Tensor) -> bool:
    """Whether a number can be read from a tensor without waiting for a device."""
    return tensor.is_cpu


def _has_parts(tensor: Tensor) -> bool:
    return tensor.is_complex() and tensor.layout is torch.strided and tensor.numel() > 0


def _counted(tensor: Tensor) -> Extent:
    """The range of a tensor on the CPU that is not finite."""
    nans = int(torch.count_nonzero(tensor.ne(tensor)))
    nonfinite = int(torch.count_nonzero((tensor - tensor).ne(0)))
    low, high = torch.aminmax(torch.nan_to_num(tensor, nan=0.0, posinf=torch.inf, neginf=-torch.inf))
    return Extent(abs(max(-low.item(), high.item())), nonfinite=nonfinite, nans=nans)


# The bits of a number without its sign, in order of magnitude: the whole number that they are, and the mask that cuts them out.
_BITS: Final = {2: (torch.int16, 2**15 - 1), 4: (torch.int32, 2**31 - 1), 8: (torch.int64, 2**63 - 1)}


def _is_normal(tensor: Tensor) -> bool:
    """Whether no value of a tensor is zero or subnormal: the bits tell it in a third of the time that it takes to count."""
    kind, mask = _BITS[tensor.element_size()]
    smallest = torch.aminmax(torch.bitwise_and(tensor.view(kind), mask))[0].item()
    return smallest > _subnormal_bits(tensor.dtype)


@cache
def _subnormal_bits(dtype: torch.dtype) -> int:
    """The bits of the largest subnormal number, as a whole number."""
    return int(torch.tensor(_SUBNORMAL[dtype], dtype=dtype).view(_BITS[dtype.itemsize][0]))


def _nonzeros(tensor: Tensor) -> Any:
    if tensor.numel() <= _FEW or not tensor.is_cpu:
        count: Any = torch.count_nonzero(tensor)
    else:
        ones = torch.ne(tensor, 0, out=torch.empty_like(tensor))
        count = ones.sum(dtype=torch.float32 if tensor.numel() <= _EXACT_ONES else torch.float64)
    return int(count) if reads_at_once(tensor) else count


def covers_memory(tensor: Tensor) -> bool:
    """Whether a tensor fills all of the memory that it lies in."""
    if tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and 0 not in tensor.stride()


def narrows(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether a cast from one floating-point dtype to another can lose small values.

    Example:
        >>> narrows(torch.float32, torch.float16), narrows(torch.bfloat16, torch.float16), narrows(torch.float16, torch.bfloat16)
        (True, True, False)
    """
    if source not in _FORMATS or result not in _FORMATS:
        return False
    wide, narrow = _FORMATS[source], _FORMATS[result]
    return narrow.bits < wide.bits or narrow.smallest_normal > wide.smallest_normal


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as records name it, such as `float16`."""
    return str(dtype).removeprefix("torch.")
