"""The same step without half precision: what would be rounded to half stays in fp32."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import DispatchMode, OperationSchema, dispatch_themselves, kept_out_of_graphs, schema_of
from halfstep._torch.tracing import has_schema
from halfstep.precision import HALVES

__all__ = ["Widening"]

_FULL: Final = torch.float32

_FLOATS: Final = HALVES | {_FULL}

# Their argument `half_to_float` is refused for what is in fp32 already.
_CONVERTING: Final = frozenset({"aten::_softmax", "aten::_log_softmax"})


@final
class Widening(DispatchMode):
    """A context in which nothing is computed in half precision: casts to it give fp32, and half tensors are widened where they are used.

    It undoes the casts of autocast as well as those of the code itself, so a step in it runs the same operations as without, and they can
    be compared one by one. What is stored in half, such as parameters, stays so, and what an operation writes to it is rounded.

    Example:
        >>> big = torch.full((2,), 300.0)
        >>> with Widening(), torch.autocast("cpu", dtype=torch.float16):
        ...     (big.half() * big.half()).tolist()
        [90000.0, 90000.0]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on fp32 in place of half."""
        kwargs = kwargs or {}
        if (types and dispatch_themselves(types)) or not has_schema(func):
            return func(*args, **kwargs)
        schema = schema_of(func)
        if schema.is_view:
            return func(*args, **kwargs)
        stored = _stored_half(schema, args, kwargs)
        if stored is not None:
            return func(*_cast(args, _FLOATS, stored), **_cast(kwargs, _FLOATS, stored))
        if schema.name in _CONVERTING:
            args = (*args[:2], False)
        return func(*_cast(args, HALVES, _FULL), **_cast(kwargs, HALVES, _FULL))


def _stored_half(schema: OperationSchema, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype of the half tensor that an operation writes to; `None` where it writes to none."""
    for place, name in schema.written:
        given = args[place] if place < len(args) else kwargs.get(name)
        for each in given if isinstance(given, list | tuple) else [given]:
            if isinstance(each, Tensor) and each.dtype in HALVES:
                return each.dtype
    return None


def _cast(value: Any, dtypes: frozenset[torch.dtype], dtype: torch.dtype) -> Any:
    """A nest of arguments with the tensors of some dtypes cast to another, and the dtypes themselves exchanged."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in dtypes and value.dtype != dtype else value
    if isinstance(value, torch.dtype):
        return dtype if value in dtypes else value
    if isinstance(value, list | tuple):
        return type(value)([_cast(each, dtypes, dtype) for each in value])
    if isinstance(value, dict):
        return {name: _cast(each, dtypes, dtype) for name, each in value.items()}
    return value
