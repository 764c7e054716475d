"""What a step was given that is not finite: in its batch, its parameters and its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.records import NonFiniteTensor

__all__ = ["named_tensors", "nonfinite_tensors", "zeroed"]


def nonfinite_tensors(batch: Any, model: nn.Module, *, since: Mapping[str, int]) -> tuple[NonFiniteTensor, ...]:
    """The tensors of a batch and a model that hold infinite values or NaN.

    Args:
        batch: The batch; `None` where it is not known.
        model: The model.
        since: The steps that made parameters so, by name.

    Example:
        >>> found = nonfinite_tensors({"x": torch.tensor([1.0, torch.nan])}, nn.Linear(1, 1), since={})
        >>> [(each.name, each.nonfinite) for each in found]
        [("batch['x']", 1)]
    """
    found = [
        *(_described(name, each, kind="input", since=None) for name, each in named_tensors(batch, "batch")),
        *(_described(name, each, kind="parameter", since=since.get(name)) for name, each in model.named_parameters()),
        *(_described(name, each, kind="buffer", since=None) for name, each in model.named_buffers()),
    ]
    return tuple(each for each in found if each is not None)


def _described(name: str, tensor: Tensor, *, kind: Literal["input", "parameter", "buffer"], since: int | None) -> NonFiniteTensor | None:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return None
    count = int((~torch.isfinite(tensor.detach())).sum())
    return NonFiniteTensor(name=name, kind=kind, nonfinite=count, elements=tensor.numel(), since=since) if count else None


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with the expression that it is reached by.

    Example:
        >>> [name for name, _ in named_tensors([{"x": torch.zeros(1)}, torch.zeros(1)], "batch")]
        ["batch[0]['x']", 'batch[1]']
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_tensors(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from named_tensors(each, f"{name}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from named_tensors(getattr(value, each.name), f"{name}.{each.name}")
    elif isinstance(getattr(value, "data", None), Mapping):  # A tokenizer's output.
        yield from named_tensors(value.data, name)


@contextmanager
def zeroed(batch: Any) -> Iterator[None]:
    """A block in which the values of a batch that are not finite are zero."""
    tensors = [each for _, each in named_tensors(batch, "") if each.is_floating_point() or each.is_complex()]
    kept = [(each, each.data) for each in tensors if each.layout is torch.strided and not bool(torch.isfinite(each.detach()).all())]
    try:
        for each, data in kept:
            each.data = torch.nan_to_num(data, nan=0.0, posinf=0.0, neginf=0.0)
        yield
    finally:
        for each, data in kept:
            each.data = data
