"""What a trace notes while operations run, and the records that are made of it afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log2
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from halfstep.numerics.operations import NAN, Traits
from halfstep.numerics.ranges import Extent, Flush, Reading, dtype_name
from halfstep.numerics.sites import Call, relative_file
from halfstep.records.trace import UNKNOWN, ModuleRange, OpRecord, Site

__all__ = ["Losses", "Observation", "Readings", "module_ranges", "op_records"]

# The results that were read, by dtype.
Readings: TypeAlias = tuple[tuple[torch.dtype, Reading], ...]

# The ranges of results before they were rounded, and how much each rounding lost.
Losses: TypeAlias = tuple[tuple[Reading, ...], tuple[Flush, ...]]


class Observation(NamedTuple):
    """One operation, as it is noted while the trace is open.

    Attributes:
        traits: What operation it is.
        call: Where it was called.
        inputs: The dtypes of its tensors.
        outputs: The dtypes of its results, with their numbers of elements.
        readings: The results that were read, by dtype.
        losses: What was lost when results were rounded; `None` where nothing was.
        suspects: The inputs that may not be finite.
        faults: Whether a number among the arguments is not finite, as `collect_tensors` says.
        seconds: How long it took; `None` where that says nothing.
    """

    traits: Traits
    call: Call
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[tuple[torch.dtype, int], ...]
    readings: Readings
    losses: Losses | None
    suspects: tuple[Extent, ...]
    faults: int
    seconds: float | None

    @property
    def flushed(self) -> int:
        """How many values that are not zero became zero or subnormal."""
        return 0 if self.losses is None else sum(int(flush.count) for flush in self.losses[1])


def op_records(observations: Iterable[Observation], *, names: dict[int, str], folder: Path) -> tuple[OpRecord, ...]:
    """The records of a trace.

    Args:
        observations: What was noted; nothing waits to be read any more.
        names: The path of each place, by its number.
        folder: What the names of files are relative to.
    """
    sites: dict[tuple[str, str, int], Site] = {}
    dtypes: dict[tuple[torch.dtype, ...], tuple[str, ...]] = {}

    def site(call: Call) -> Site:
        _, place, (file, line) = call
        key = (names.get(place, UNKNOWN), file, line)
        if key not in sites:
            sites[key] = Site(module=key[0], file=relative_file(file, folder=folder), line=line)
        return sites[key]

    def named(kinds: tuple[torch.dtype, ...]) -> tuple[str, ...]:
        return dtypes.setdefault(kinds, tuple(map(dtype_name, kinds)))

    return tuple(
        OpRecord(
            op=each.traits.name,
            phase="backward" if each.call[0] else "forward",
            site=site(each.call),
            input_dtypes=named(each.inputs),
            output_dtypes=named(tuple(dtype for dtype, _ in each.outputs)),
            elements=sum(count for dtype, count in each.outputs if dtype.is_floating_point or dtype.is_complex),
            absmax=_largest(reading for _, reading in each.readings),
            nonfinite=sum(_nonfinite(reading) for _, reading in each.readings),
            nans=sum(int(reading.nans) for _, reading in each.readings if isinstance(reading, Extent)),
            flushed=each.flushed,
            exact_absmax=None if each.losses is None else _largest(each.losses[0]),
            has_nonfinite_input=each.faults != 0 or any(extent.nonfinite > 0 for extent in each.suspects),
            has_nan_input=bool(each.faults & NAN) or any(extent.nans > 0 for extent in each.suspects),
            node=each.call[0],
            seconds=each.seconds,
        )
        for each in observations
    )


def _largest(readings: Iterable[Reading]) -> float | None:
    return max(map(_absmax, readings), default=None)


def _absmax(reading: Reading) -> float:
    return float(reading.absmax) if isinstance(reading, Extent) else reading


def _nonfinite(reading: Reading) -> int:
    return int(reading.nonfinite) if isinstance(reading, Extent) else 0


class _Sum:
    __slots__ = ("absmax", "flushed", "nonfinite", "ops")

    def __init__(self) -> None:
        self.ops = 0
        self.absmax: float | None = None
        self.nonfinite = 0
        self.flushed = 0


def module_ranges(observations: Iterable[Observation], *, names: dict[int, str]) -> tuple[ModuleRange, ...]:
    """What each module computed in each dtype, by itself, in the order in which they first did.

    Args:
        observations: What was noted; nothing waits to be read any more.
        names: The path of each place, by its number.
    """
    sums: dict[tuple[str, torch.dtype], _Sum] = {}
    for each in observations:
        module = names.get(each.call[1], UNKNOWN)
        for dtype in dict.fromkeys(dtype for dtype, _ in each.outputs):
            sums.setdefault((module, dtype), _Sum()).ops += 1
        for dtype, reading in each.readings:
            total, absmax = sums[module, dtype], _absmax(reading)
            total.nonfinite += _nonfinite(reading)
            if absmax < inf:
                total.absmax = max(total.absmax or 0.0, absmax)
        if each.flushed:
            sums[module, each.outputs[0][0]].flushed += each.flushed
    return tuple(_module_range(module, dtype, total) for (module, dtype), total in sums.items() if dtype.is_floating_point)


def _module_range(module: str, dtype: torch.dtype, total: _Sum) -> ModuleRange:
    headroom = log2(torch.finfo(dtype).max) - log2(total.absmax) if total.absmax else None
    return ModuleRange(
        module=module,
        dtype=dtype_name(dtype),
        ops=total.ops,
        absmax=total.absmax,
        nonfinite=total.nonfinite,
        flushed=total.flushed,
        headroom=headroom,
    )
