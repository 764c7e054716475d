"""What a trace keeps of each operation for a comparison with another trace: where its arguments came from, and some of its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from halfstep._torch.tracing import storage_key, storage_keys
from halfstep.numerics.operations import Traits

__all__ = ["OUTSIDE", "Details", "OperationDetail"]

# Stands for a tensor that no operation of the trace has made.
OUTSIDE: Final = -1

_NARROW: Final = (torch.float16, torch.bfloat16, torch.float32, torch.bool)

# The golden ratio spreads indices evenly, whatever the shape of a tensor is.
_SPREAD: Final = 0.6180339887498949


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # Tensors have no single truth value to compare by.
class OperationDetail:
    """What there is to know of one operation beside its record.

    Attributes:
        sources: For each tensor that it was given, the index of the operation that wrote to its memory last, or `OUTSIDE`; empty for views,
            and for what takes no values, such as `ones_like`.
        outside: For each `OUTSIDE` among them, the name of the model's parameter or buffer that it is; empty for another tensor.
        sample: The same few values of its first result whenever it runs, in fp32, or in fp64 where that loses digits; `None` where that
            is no new tensor of real numbers.
        numbers: The floating-point numbers among its arguments.
    """

    sources: tuple[int, ...]
    sample: Tensor | None
    numbers: tuple[float, ...]
    outside: tuple[str, ...] = ()


@final
class Details:
    """Notes the details of operations, in the order in which they run.

    All of it has to be called inside of `untraced()`, and while the memory of all results is held.

    Args:
        size: How many values of each result are kept, at most.
        model: Whose parameters and buffers are known by name.
    """

    def __init__(self, size: int, *, model: nn.Module | None = None) -> None:
        self._size = size
        named = () if model is None else (*model.named_parameters(), *model.named_buffers())
        self._names = {storage_key(tensor): name for name, tensor in named if not nn.parameter.is_lazy(tensor)}
        self._writers: dict[int | None, int] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}
        self.noted: list[OperationDetail] = []

    def note(self, traits: Traits, inputs: Sequence[Tensor], outputs: Sequence[Tensor], arguments: Iterable[Any]) -> None:
        """Takes in an operation that has run."""
        index = len(self.noted)
        sources: tuple[int, ...] = ()
        outside: tuple[str, ...] = ()
        sample = None
        if not traits.is_view:
            if not traits.takes_no_values:
                keys = storage_keys(inputs)
                sources = tuple([self._writers.get(key, OUTSIDE) for key in keys])
                if OUTSIDE in sources:
                    outside = tuple([self._names.get(key, "") for key in keys if key not in self._writers])
            for key in storage_keys(outputs):
                if key is not None:
                    self._writers[key] = index
            if traits.is_read and outputs:
                sample = self._sample(outputs[0])
        numbers = tuple([each for each in arguments if type(each) is float])
        self.noted.append(OperationDetail(sources=sources, outside=outside, sample=sample, numbers=numbers))

    def _sample(self, tensor: Tensor) -> Tensor | None:
        if tensor.is_complex() or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta or tensor.is_nested:
            return None
        try:
            values = tensor.reshape(-1) if tensor.numel() <= self._size else tensor.take(self._indices(tensor))
            return values.to(torch.float32 if tensor.dtype in _NARROW else torch.float64, copy=True)
        except RuntimeError:  # One that has no memory although it is said to have some.
            return None

    def _indices(self, tensor: Tensor) -> Tensor:
        key = (tensor.numel(), tensor.device)
        if key not in self._places:
            steps = torch.arange(self._size, dtype=torch.float64) * _SPREAD
            self._places[key] = ((steps - steps.floor()) * tensor.numel()).long().to(tensor.device)
        return self._places[key]
