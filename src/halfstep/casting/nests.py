"""Casts of the tensors in a nest of arguments or results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep.precision import HALVES

__all__ = ["Container", "NestChange", "cast_arguments", "cast_tensors", "device_type_of", "settle"]

# What autocast casts; float64 and everything that is no floating-point number stays as it is.
_CASTABLE: Final = frozenset({torch.float32, *HALVES})

_PLAIN: Final = frozenset({int, float, bool, str, type(None)})


def cast_tensors(nest: Any, dtype: torch.dtype) -> Any:
    """The same nest with its fp32, bf16 and fp16 tensors in a dtype; a part without any is passed on itself.

    It looks into tuples, named tuples (such as a `PackedSequence`), lists, mappings and dataclasses. Tensors of other dtypes, and objects
    of other kinds, stay as they are. A tensor that occurs twice is cast once.

    Args:
        nest: Whatever a module takes or returns.
        dtype: `torch.float32`, `torch.bfloat16` or `torch.float16`.

    Example:
        >>> nest = (torch.zeros(2, dtype=torch.bfloat16), {"mask": torch.ones(2, dtype=torch.bool)}, "causal")
        >>> values = cast_tensors(nest, torch.float32)
        >>> values[0].dtype, values[1]["mask"].dtype, values[2]
        (torch.float32, torch.bool, 'causal')
    """
    cast = _cast_to(dtype)
    return cast(nest) if isinstance(nest, Tensor) else NestChange(cast).of(nest)


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], list[Container]]:
    """The arguments of a call, cast as by `cast_tensors`, and the lists and mappings among them that are copies.

    A tensor that occurs in several arguments is cast once, so that what were the same tensor is the same tensor again:
    `nn.MultiheadAttention` asks for it. What the call does to a list or a mapping, `settle` does to the one that was passed.

    Example:
        >>> x = torch.zeros(2, dtype=torch.bfloat16)
        >>> (one, two), _, _ = cast_arguments((x, x), {}, torch.float32)
        >>> one is two, one.dtype
        (True, torch.float32)
    """
    casts = NestChange(_cast_to(dtype))
    cast = tuple([casts.of(each) for each in args])
    return cast, {name: casts.of(each) for name, each in kwargs.items()} if kwargs else kwargs, casts.containers


@final
@dataclass(frozen=True, slots=True)
class Container:
    """A list or a mapping, its copy with tensors that are cast, and what was in the two of them."""

    given: Any
    copy: Any
    items: tuple[Any, ...]
    casts: tuple[Any, ...]
    keys: tuple[Any, ...] = ()


def settle(containers: list[Container]) -> None:
    """Does to lists and mappings what has been done to their copies since, such as an entry that was appended to a cache.

    Example:
        >>> cache = [torch.zeros(1, dtype=torch.bfloat16)]
        >>> (copied,), _, containers = cast_arguments((cache,), {}, torch.float32)
        >>> copied.append("more")
        >>> settle(containers)
        >>> len(cache), cache[0].dtype
        (2, torch.bfloat16)
    """
    for each in containers:
        if isinstance(each.given, list):
            _settle_list(each)
        else:
            _settle_mapping(each)


def _settle_list(container: Container) -> None:
    now, before = container.copy, container.casts
    if len(now) == len(before) and _same(now, before):
        return
    if len(now) > len(before) and _same(now[: len(before)], before):
        container.given.extend(now[len(before) :])
    else:
        items = {id(cast): item for cast, item in zip(before, container.items, strict=True)}
        container.given[:] = [items.get(id(value), value) for value in now]


def _settle_mapping(container: Container) -> None:
    before = dict(zip(container.keys, container.casts, strict=True))
    for key, value in container.copy.items():
        if key not in before or before[key] is not value:
            container.given[key] = value
    for key in before:
        if key not in container.copy:
            container.given.pop(key, None)


def _cast_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype is not dtype and leaf.dtype in _CASTABLE else leaf

    return cast


@final
class NestChange:
    """Nests of tuples, named tuples, lists, mappings and dataclasses with something else in them; a part that stays is passed on itself.

    Args:
        change: Called with each tensor, once, and with each object that is none of these; returns what is to be there, or the same.

    Attributes:
        containers: The lists and mappings that are copies.

    Example:
        >>> NestChange(lambda leaf: leaf.double() if isinstance(leaf, Tensor) else leaf).of({"x": [torch.ones(1)], "name": "a"})
        {'x': [tensor([1.], dtype=torch.float64)], 'name': 'a'}
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, Any] = {}
        self.containers: list[Container] = []

    def of(self, nest: Any) -> Any:
        """The nest after the change."""
        if isinstance(nest, Tensor):
            return self._tensor(nest)
        if type(nest) in _PLAIN:
            return nest
        if isinstance(nest, tuple | list | Mapping):
            for each in self.containers:
                if each.given is nest:  # Passed twice: what is done to the one is done to the other.
                    return each.copy
            return self._mapping(nest) if isinstance(nest, Mapping) else self._sequence(nest)
        if is_dataclass(nest) and not isinstance(nest, type):
            return _with_attributes(nest, {each.name: self.of(getattr(nest, each.name)) for each in fields(nest)})
        return self._change(nest)

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) in self._done:
            return self._done[id(tensor)]
        changed = self._change(tensor)
        if changed is not tensor:
            self._done[id(tensor)] = changed
        return changed

    def _sequence(self, nest: Any) -> Any:
        parts = [self.of(part) for part in nest]
        if _same(parts, nest):
            return nest
        if isinstance(nest, list):
            result: Any = parts if type(nest) is list else copy.copy(nest)
            result[:] = parts
            self.containers.append(Container(nest, result, tuple(nest), tuple(parts)))
            return result
        if type(nest) is tuple or hasattr(nest, "n_fields"):  # What torch returns of max() and its like is made of a sequence.
            return type(nest)(parts)
        # A class of its own may take other arguments than its items, as PackedSequence does.
        result = tuple.__new__(type(nest), parts)
        if hasattr(nest, "__dict__"):
            vars(result).update(vars(nest))
        return result

    def _mapping(self, nest: Any) -> Any:
        values = {key: self.of(value) for key, value in nest.items()}
        if _same(list(values.values()), list(nest.values())):
            return nest
        result = values if type(nest) is dict else _with_items(nest, values)
        if isinstance(nest, MutableMapping):
            self.containers.append(Container(nest, result, tuple(nest.values()), tuple(values.values()), tuple(values)))
        return result


def _same(parts: Sequence[Any], before: Sequence[Any]) -> bool:
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
