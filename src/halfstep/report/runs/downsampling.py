"""A million numbers, drawn by two thousand of them, with every spike still there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Places", "kept_places", "marked_places", "medians"]

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


def kept_places(values: Floats, *, buckets: int) -> Places:
    """Which of many values to draw, so that the line looks as if all of them were drawn.

    The values are divided into buckets of neighbours. The lowest and the highest of each bucket are kept, the first and the last of
    all, and the first of each bucket that is not finite.

    Args:
        values: The values, in the order in which they are drawn.
        buckets: How many buckets there are, at least 1. Up to twice as many values are all kept.

    Returns:
        Places in `values`, from the first to the last, each once: at most three for each bucket, and two.

    Example:
        >>> kept_places(np.array([1.0, 2.0, 3.0, 9.0, 1.0, 2.0, 3.0, 2.0]), buckets=2).tolist()
        [0, 3, 4, 6, 7]
    """
    count = len(values)
    if count <= 2 * buckets:
        return np.arange(count, dtype=np.int64)
    rows = _bucketed(values, buckets=buckets, fill=np.nan)
    is_finite = np.isfinite(rows)
    firsts = np.arange(len(rows), dtype=np.int64) * rows.shape[1]
    lowest = firsts + np.where(is_finite, rows, np.inf).argmin(axis=1)
    highest = firsts + np.where(is_finite, rows, -np.inf).argmax(axis=1)
    broken = firsts + is_finite.argmin(axis=1)
    places = np.concatenate(([0, count - 1], lowest, highest, broken[~is_finite.all(axis=1)]))
    # The last bucket may be filled up with values that are none.
    return np.unique(places[places < count]).astype(np.int64)


def medians(positions: Floats, values: Floats, *, buckets: int) -> tuple[Floats, Floats]:
    """The middle of each bucket of neighbours: what a noisy line comes to.

    Args:
        positions: Where each value stands.
        values: The values. Those that are not finite do not count.
        buckets: How many buckets there are, at least 1.

    Returns:
        The median position and the median value of each bucket, NaN where nothing in it is finite.

    Example:
        >>> positions, middles = medians(np.arange(6.0), np.array([1.0, 2.0, 9.0, np.nan, 4.0, 6.0]), buckets=2)
        >>> positions.tolist(), middles.tolist()
        ([1.0, 4.0], [2.0, 5.0])
    """
    if not len(values):
        return values[:0], values[:0]
    rows = _bucketed(np.where(np.isfinite(values), values, np.nan), buckets=buckets, fill=np.nan)
    where = _bucketed(positions, buckets=buckets, fill=np.nan)
    known = ~np.isnan(rows).all(axis=1)
    middles = np.full(len(rows), np.nan)
    middles[known] = np.nanmedian(rows[known], axis=1)
    return np.nanmedian(where, axis=1), middles


def marked_places(is_marked: npt.NDArray[np.bool_], *, buckets: int) -> tuple[Places, Places]:
    """Which of many events to draw: the first of each bucket of neighbours, and how many it stands for. Each event is in one of them.

    Args:
        is_marked: Where an event is.
        buckets: How many buckets there are, at least 1.

    Returns:
        The places that are drawn, and how many events each stands for, itself included.

    Example:
        >>> places, counts = marked_places(np.array([False, True, True, False, False, True]), buckets=2)
        >>> places.tolist(), counts.tolist()
        ([1, 5], [2, 1])
    """
    events = np.flatnonzero(is_marked)
    size = max(1, -(-len(is_marked) // buckets))
    _, firsts, counts = np.unique(events // size, return_index=True, return_counts=True)
    return events[firsts].astype(np.int64), counts.astype(np.int64)


def _bucketed(values: Floats, *, buckets: int, fill: float) -> npt.NDArray[Any]:
    """The values in rows of equal length, the last of which is filled up."""
    size = max(1, -(-len(values) // buckets))
    rows = -(-len(values) // size)
    return np.pad(values, (0, rows * size - len(values)), constant_values=fill).reshape(rows, size)
