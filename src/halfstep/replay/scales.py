"""The highest loss scale that the range of half precision allows."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2
from typing import Final

from halfstep.records import OpRecord
from halfstep.replay.runs import Run
from halfstep.replay.wording import HALF_LARGEST

__all__ = ["highest_scale"]

# None above this is proposed.
_HIGHEST: Final = 2.0**40


def highest_scale(run: Run, *, measured: Callable[[int], OpRecord | None] | None = None) -> float:
    """The largest power of two with which no half-precision result of the backward pass leaves its range.

    Args:
        run: A run in low precision.
        measured: For the index of an operation the same in a run with a scale of 1, whose values are taken in place of those of `run`,
            which may have vanished; `None` for those of `run` itself, as far as they are finite.
    """
    factors = []
    for index, op in enumerate(run.ops):
        if op.phase != "backward" or not op.output_dtypes or op.output_dtypes[0] not in HALF_LARGEST:
            continue
        source = op if measured is None else measured(index)
        if source is not None and source.absmax and not source.nonfinite:
            factors.append(HALF_LARGEST[op.output_dtypes[0]] / max(source.absmax, source.exact_absmax or 0.0))
    if not factors:
        return run.scale
    return min((run.scale if measured is None else 1.0) * 2.0 ** floor(log2(min(factors))), _HIGHEST)
