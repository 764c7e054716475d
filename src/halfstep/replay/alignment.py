"""Two traces of one step, operation by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Final, final

import numpy as np
from torch import Tensor

from halfstep.numerics import OUTSIDE, kind_of_pass
from halfstep.records import OpRecord, bare_name
from halfstep.replay.runs import Run

__all__ = ["Pair", "align", "relative_error", "relative_errors"]


# What keeps the values that it is given.
_KEEPING: Final = frozenset({"converts", "moves"})

# Rounding to half precision changes a value by less than this.
_ROUNDING: Final = 0.05


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
        >>> import torch
        >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) < 0.5
        True
    """
    return relative_errors([(value, reference)])[0]


def relative_errors(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The same for many pairs at once. Where two have different numbers of values, there is nothing to compare: 0."""
    sizes = [min(value.numel(), reference.numel()) if value.numel() == reference.numel() else 0 for value, reference in pairs]
    values, references = (np.zeros((len(pairs), max(sizes, default=0))) for _ in range(2))
    for place, ((value, reference), size) in enumerate(zip(pairs, sizes, strict=True)):
        if size:
            values[place, :size] = value.cpu().numpy().reshape(-1)
            references[place, :size] = reference.cpu().numpy().reshape(-1)
    both = np.isfinite(values) & np.isfinite(references)
    values, references = np.where(both, values, 0.0), np.where(both, references, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        # Divided by the largest of each first, so that no square overflows or vanishes.
        largest = np.maximum(np.abs(values), np.abs(references)).max(axis=1, initial=0.0, keepdims=True)
        largest[largest == 0] = 1.0
        differences = np.linalg.norm(values / largest - references / largest, axis=1)
        norms = np.linalg.norm(references / largest, axis=1)
    return [
        0.0 if difference == 0 else float(difference / norm) if norm else inf for difference, norm in zip(differences, norms, strict=True)
    ]


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
        errors: list[float | None] = [None] * len(self.low.ops)
        factor = self.low.scale / self.full.scale
        places, pairs, carrying = [], [], []
        for index, (detail, place) in enumerate(zip(self.low.details, self.counterparts, strict=True)):
            reference = None if place is None else self.full.details[place].sample
            if detail.sample is not None and reference is not None:
                places.append(index)
                pairs.append((detail.sample, reference))
                if factor != 1 and self.low.ops[index].phase == "backward":
                    carrying.append((index, (detail.sample, reference * factor)))
        for index, error in zip(places, relative_errors(pairs), strict=True):
            errors[index] = error
        # Gradients carry the loss scale, and what the backward pass computes besides does not.
        for (index, _), error in zip(carrying, relative_errors([pair for _, pair in carrying]), strict=True):
            errors[index] = min(errors[index] or 0.0, error)
        return errors

    @property
    def is_one_step(self) -> bool:
        """Whether both began with the same values from outside.

        That is told by what low precision does not change: values that are cast or moved, which rounds them at most, and what is computed
        from fp32 in both.
        """
        for index, (detail, error) in enumerate(zip(self.low.details, self.errors, strict=True)):
            is_from_outside = bool(detail.sources) and all(source == OUTSIDE for source in detail.sources)
            if is_from_outside and not detail.numbers and (error or 0.0) > _ROUNDING and self._keeps_values(index):
                return False
        return True

    def _keeps_values(self, index: int) -> bool:
        op, other = self.low.ops[index], self.counterpart(index)
        return kind_of_pass(bare_name(op.op)) in _KEEPING or (
            other is not None and set(op.input_dtypes) == set(other.input_dtypes) == {"float32"}
        )

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
