"""Batches: nests of tuples, lists and dictionaries that hold tensors, whose first dimension counts samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfstep._torch import tree_leaves, tree_map
from halfstep.errors import ConfigurationError

__all__ = ["map_tensors", "move_batch", "sample_count", "split_batch", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The same nest with the function applied to every tensor; anything else stays as it is.

    Example:
        >>> map_tensors(lambda t: tuple(t.shape), {"x": torch.zeros(2, 3), "name": "a"})
        {'x': (2, 3), 'name': 'a'}
    """
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def sample_count(batch: Any) -> int | None:
    """The number of samples: the size of the first dimension of the first tensor that has one; `None` without such a tensor.

    Example:
        >>> sample_count((torch.zeros(8, 3), torch.zeros(8)))
        8
    """
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), None)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order. It looks into mappings of any kind and into dataclasses, too, such as a tokenizer's output.

    Example:
        >>> from collections import UserDict
        >>> [tuple(tensor.shape) for tensor in tensors_in([UserDict(ids=torch.zeros(4, 7)), torch.ones(2)])]
        [(4, 7), (2,)]
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, each.name) for each in fields(leaf)])


def move_batch(batch: Any, *, device: torch.device, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    """The batch on a device; with `torch.channels_last`, its 4-d floating-point tensors in that layout.

    Objects that are no tensors but have a method `to`, such as the Hugging Face tokenizers' output, are moved by it.

    Args:
        batch: The batch.
        device: Where to.
        memory_format: `torch.preserve_format` or `torch.channels_last`.

    Example:
        >>> move_batch([torch.zeros(2)], device=torch.device("cpu"))
        [tensor([0., 0.])]
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            images = leaf.dim() == 4 and leaf.is_floating_point()
            return leaf.to(device, memory_format=memory_format if images else torch.preserve_format)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return tree_map(move, batch)


def split_batch(batch: Any, *, parts: int) -> list[tuple[Any, float]]:
    """The batch cut along the first dimension of its tensors, each part with its share of the samples.

    Args:
        batch: A nest whose tensors with at least one dimension all have the same first dimension, N. Everything else goes into each part.
        parts: How many, at most N. Sizes differ by one sample at most.

    Returns:
        Pairs of a part and its number of samples divided by N. The shares add up to 1.

    Raises:
        ConfigurationError: The batch has no such tensor, or tensors of several sizes, or fewer samples than parts.

    Example:
        >>> [(part.tolist(), share) for part, share in split_batch(torch.arange(4), parts=2)]
        [([0, 1], 0.5), ([2, 3], 0.5)]
    """
    sizes = sorted({leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0})
    advice = "Split it yourself: call autocast(), backward() and step() for each micro-batch."
    if not sizes:
        raise ConfigurationError(f"A batch of {type(batch).__name__} has no tensor to split into {parts} micro-batches. {advice}")
    if len(sizes) > 1:
        listed = ", ".join(map(str, sizes))
        raise ConfigurationError(f"The tensors of this batch differ in their first dimension ({listed}). {advice}")
    count = sizes[0]
    if count < parts:
        samples = f"{count} sample{'' if count == 1 else 's'}"
        raise ConfigurationError(
            f"A batch of {samples} cannot be split into accumulate={parts} micro-batches. Use a larger batch, or a smaller accumulate."
        )
    edges = [count * index // parts for index in range(parts + 1)]

    def cut(start: int, stop: int) -> Any:
        return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() > 0 else tensor, batch)

    return [(cut(start, stop), (stop - start) / count) for start, stop in pairwise(edges)]
