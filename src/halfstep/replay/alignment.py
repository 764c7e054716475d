"""Two traces of one step, operation by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from halfstep.numerics import OUTSIDE
from halfstep.records import OpRecord
from halfstep.replay.runs import Run

__all__ = ["Pair", "align", "relative_error"]


def align(low: Sequence[OpRecord], full: Sequence[OpRecord]) -> list[int | None]:
    """For each operation of a trace the same operation of another trace, by where it was called and how often before.

    Args:
        low: The operations of one trace.
        full: Those of another.

    Returns:
        Indices into `full`; `None` where an operation ran there another number of times.
    """
    first, second = _by_call(low), _by_call(full)
    found: list[int | None] = [None] * len(low)
    for key, places in first.items():
        others = second.get(key, [])
        if len(others) == len(places):
            for place, other in zip(places, others, strict=True):
                found[place] = other
    return found


def _by_call(ops: Sequence[OpRecord]) -> dict[Any, list[int]]:
    calls: dict[Any, list[int]] = defaultdict(list)
    for place, op in enumerate(ops):
        calls[op.op, op.phase, op.site, op.node].append(place)
    return calls


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The L2 norm of a difference over that of the reference, where both are finite; 0 where they are equal.

    Example:
        >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) < 0.5
        True
    """
    if value.shape != reference.shape:
        return 0.0
    first, second = value.double(), reference.double()
    both = torch.isfinite(first) & torch.isfinite(second)
    first, second = first[both], second[both]
    difference, norm = float(torch.linalg.vector_norm(first - second)), float(torch.linalg.vector_norm(second))
    return 0.0 if difference == 0 else difference / norm if norm else torch.inf


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A traced run in low precision, and the same step in fp32, both with details.

    Attributes:
        low: The run in low precision.
        full: The same in fp32, with the same random numbers.
    """

    low: Run
    full: Run

    @cached_property
    def counterparts(self) -> list[int | None]:
        """For each operation of `low` the index of the same in `full`."""
        return align(self.low.ops, self.full.ops)

    def counterpart(self, index: int) -> OpRecord | None:
        """The operation of `full` that an operation of `low` is in fp32."""
        place = self.counterparts[index]
        return None if place is None else self.full.ops[place]

    @cached_property
    def errors(self) -> list[float | None]:
        """The relative error of the sample of each operation; `None` where it has none, or cannot be compared."""
        errors: list[float | None] = []
        for detail, place in zip(self.low.details, self.counterparts, strict=True):
            reference = None if place is None else self.full.details[place].sample
            errors.append(None if detail.sample is None or reference is None else relative_error(detail.sample, reference))
        return errors

    def input_error(self, index: int) -> float:
        """The largest relative error among what an operation was given; operations that cannot be compared are looked through."""
        waiting, seen, largest = [*self.low.details[index].sources], {OUTSIDE}, 0.0
        while waiting:
            source = waiting.pop()
            if source in seen:
                continue
            seen.add(source)
            error = self.errors[source]
            if error is None:
                waiting.extend(self.low.details[source].sources)
            else:
                largest = max(largest, error)
        return largest
