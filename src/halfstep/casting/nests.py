"""Casts of the tensors in a nest of arguments or results."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["HALVES", "cast_arguments", "cast_tensors", "device_type_of"]

HALVES: Final = frozenset({torch.float16, torch.bfloat16})

# What autocast casts; float64 and everything that is no floating-point number stays as it is.
_CASTABLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})

_PLAIN: Final = frozenset({int, float, bool, str, type(None)})


def cast_tensors(nest: Any, dtype: torch.dtype, *, done: dict[int, Tensor] | None = None) -> Any:
    """The same nest with its fp32, bf16 and fp16 tensors in a dtype; a part without any is passed on itself.

    It looks into tuples, named tuples (such as a `PackedSequence`), lists, mappings and dataclasses. Tensors of other dtypes, and objects
    of other kinds, stay as they are.

    Args:
        nest: Whatever a module takes or returns.
        dtype: `torch.float32`, `torch.bfloat16` or `torch.float16`.
        done: Casts that were made already, by the `id` of the tensor. A tensor that occurs twice is cast once, so that what were the same
            tensor is the same tensor again: `nn.MultiheadAttention` asks for it.

    Example:
        >>> nest = (torch.zeros(2, dtype=torch.bfloat16), {"mask": torch.ones(2, dtype=torch.bool)}, "causal")
        >>> values = cast_tensors(nest, torch.float32)
        >>> values[0].dtype, values[1]["mask"].dtype, values[2]
        (torch.float32, torch.bool, 'causal')
    """
    if isinstance(nest, Tensor):
        if nest.dtype is dtype or nest.dtype not in _CASTABLE:
            return nest
        if done is None:
            return nest.to(dtype)
        if id(nest) not in done:
            done[id(nest)] = nest.to(dtype)
        return done[id(nest)]
    if type(nest) in _PLAIN:
        return nest
    return _cast_parts(nest, dtype, {} if done is None else done)


def cast_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, cast as by `cast_tensors`; a tensor that occurs in several of them is cast once.

    Example:
        >>> x = torch.zeros(2, dtype=torch.bfloat16)
        >>> (one, two), _ = cast_arguments((x, x), {}, torch.float32)
        >>> one is two, one.dtype
        (True, torch.float32)
    """
    done: dict[int, Tensor] = {}
    cast = tuple([cast_tensors(each, dtype, done=done) for each in args])
    return cast, {name: cast_tensors(each, dtype, done=done) for name, each in kwargs.items()} if kwargs else kwargs


def _cast_parts(nest: Any, dtype: torch.dtype, done: dict[int, Tensor]) -> Any:
    if isinstance(nest, tuple | list):
        parts = [cast_tensors(part, dtype, done=done) for part in nest]
        if _same(parts, nest):
            return nest
        if isinstance(nest, tuple) and hasattr(
            nest, "_fields"
        ):  # A named tuple: its class may take other arguments than its fields, as PackedSequence does.
            return tuple.__new__(type(nest), parts)
        return type(nest)(parts)
    if isinstance(nest, Mapping):
        values = {key: cast_tensors(value, dtype, done=done) for key, value in nest.items()}
        if _same(list(values.values()), list(nest.values())):
            return nest
        return values if type(nest) is dict else _with_items(nest, values)
    if is_dataclass(nest) and not isinstance(nest, type):
        return _with_attributes(nest, {each.name: cast_tensors(getattr(nest, each.name), dtype, done=done) for each in fields(nest)})
    return nest


def _same(parts: list[Any], before: Any) -> bool:
    return all(part is other for part, other in zip(parts, before, strict=True))


def _with_items(nest: Any, values: dict[Any, Any]) -> Any:
    changed = copy.copy(nest)
    for key, value in values.items():
        if value is not nest[key]:
            changed[key] = value
    return changed


def _with_attributes(nest: Any, values: dict[str, Any]) -> Any:
    changed = {name: value for name, value in values.items() if value is not getattr(nest, name)}
    if not changed:
        return nest
    result = copy.copy(nest)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # The dataclass may be frozen.
    return result


def device_type_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The type of the device of the first floating-point tensor in the arguments of a call, or in tuples, lists and dictionaries there.

    Where there is none, that of the first tensor, such as one of token numbers; `None` without any.

    Example:
        >>> device_type_of((torch.zeros(2, dtype=torch.long), [torch.zeros(2)]), {})
        'cpu'
    """
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # As it mostly is.
        return args[0].device.type
    return _first_device((args, kwargs), floating=True) or _first_device((args, kwargs), floating=False)


def _first_device(nest: Any, *, floating: bool) -> str | None:
    if isinstance(nest, Tensor):
        return nest.device.type if not floating or nest.is_floating_point() else None
    if isinstance(nest, dict):
        nest = list(nest.values())
    elif not isinstance(nest, tuple | list):
        return None
    for part in nest:
        found = _first_device(part, floating=floating)
        if found is not None:
            return found
    return None
