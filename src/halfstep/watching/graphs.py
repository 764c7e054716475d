"""What a loss was computed from, as far as its graph tells."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from halfstep._torch.watching import result_dtype, saved_factors

__all__ = ["cast_dtype", "find_mark", "has_factor", "mark"]

# A loss is scaled near the end of its graph: divided, or added to others, but not sent through another model.
_NEAR: Final = 400

# To see that a graph casts somewhere, its first layers may have to be reached.
_FAR: Final = 20_000

_CAST: Final = "ToCopyBackward0"
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})


def mark(tensor: Tensor, key: object, value: object) -> bool:
    """Notes something in the graph at a tensor, where it ends with the graph; returns whether it has one."""
    node: Any = tensor.grad_fn
    if node is None:
        return False
    node.metadata[key] = value
    return True


def find_mark(root: Tensor, key: object) -> Any:
    """What was noted in the graph of a tensor, at the place that is nearest to it; `None` where nothing was."""
    node: Any = root.grad_fn
    if node is None:
        return None
    found = node.metadata.get(key)
    if found is not None:
        return found
    return next((each.metadata[key] for each in _nodes(node, limit=_NEAR) if key in each.metadata), None)


def has_factor(root: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether a tensor was multiplied, near its end, with one of these."""
    places = {each.data_ptr() for each in factors}
    return root.grad_fn is not None and any(
        saved.data_ptr() in places for node in _nodes(root.grad_fn, limit=_NEAR) for saved in saved_factors(node)
    )


def cast_dtype(root: Tensor) -> torch.dtype | None:
    """The half precision that a graph casts to, as autocast does with the weights that it computes with; `None` where it casts to none.

    Example:
        >>> x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = x @ w
        >>> cast_dtype(y.sum()), cast_dtype((x @ w).sum())
        (torch.bfloat16, None)
    """
    nodes = () if root.grad_fn is None else _nodes(root.grad_fn, limit=_FAR)
    found = (result_dtype(each) for each in nodes if each.name() == _CAST)
    return next((each for each in found if each in _HALVES), None)


def _nodes(root: Any, *, limit: int) -> Iterator[Any]:
    """The nodes of a graph, those near its root first."""
    seen, waiting = {root}, deque([root])
    while waiting and limit > 0:
        node = waiting.popleft()
        limit -= 1
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
