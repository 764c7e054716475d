"""What `amp.initialize` hangs on models: casts of what goes in and comes out, and a state dict in fp32."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from halfstep._torch import own_buffers, own_parameters
from halfstep.casting import cast_tensors

__all__ = ["ArgumentsCast", "OutputsCast", "show_state_in_fp32"]

_HALVES = frozenset({torch.float16, torch.bfloat16})


@final
@dataclass(frozen=True, slots=True)
class OutputsCast:
    """A hook, which pickles with the model, by which what a model returns is cast."""

    dtype: torch.dtype

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Called by torch after each forward pass."""
        return cast_tensors(output, self.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsCast:
    """A hook by which what a policy leaves as it is comes to be cast.

    Copies and pickles of the model are without the policy, so those of the hook cast nothing.

    Attributes:
        batches: What batches of a class of the user's own are asked to cast themselves to, by their `to`; `None` for as they are.
        doubles: Whether float64 tensors are cast to fp32, from which the policy goes on.

    Example:
        >>> hook = ArgumentsCast(doubles=True)
        >>> (x, *_), _ = hook(nn.Identity(), ([torch.ones(1, dtype=torch.float64)],), {})
        >>> x[0].dtype
        torch.float32
    """

    batches: torch.dtype | None = None
    doubles: bool = False

    def __reduce__(self) -> tuple[type[ArgumentsCast], tuple[()]]:
        return ArgumentsCast, ()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Called by torch before each forward pass."""
        done: dict[int, Tensor] = {}
        return tuple([self._of(each, done) for each in args]), {name: self._of(each, done) for name, each in kwargs.items()}

    def _of(self, nest: Any, done: dict[int, Tensor]) -> Any:
        if isinstance(nest, Tensor):
            return self._tensor(nest, done)
        if isinstance(nest, PackedSequence):
            return nest.to(torch.float32) if self.doubles and nest.data.dtype is torch.float64 else nest
        if isinstance(nest, tuple | list):
            return _with_parts(nest, [self._of(part, done) for part in nest])
        if isinstance(nest, Mapping):
            return _with_items(nest, {key: self._of(value, done) for key, value in nest.items()})
        if is_dataclass(nest) and not isinstance(nest, type):
            return _with_attributes(nest, {each.name: self._of(getattr(nest, each.name), done) for each in fields(nest)})
        if self.batches is None or isinstance(nest, nn.Module | type) or not callable(getattr(nest, "to", None)):
            return nest
        return nest.to(self.batches)

    def _tensor(self, tensor: Tensor, done: dict[int, Tensor]) -> Tensor:
        if not self.doubles or tensor.dtype is not torch.float64:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.float()
        return done[id(tensor)]


def _with_parts(nest: Any, parts: list[Any]) -> Any:
    if all(part is before for part, before in zip(parts, nest, strict=True)):
        return nest
    if isinstance(nest, list):
        result = copy.copy(nest)
        result[:] = parts
        return result
    if type(nest) is tuple or hasattr(nest, "n_fields"):  # What torch returns of max() and its like is made of a sequence.
        return type(nest)(parts)
    return tuple.__new__(type(nest), parts)


def _with_items(nest: Any, values: dict[Any, Any]) -> Any:
    changed = {key: value for key, value in values.items() if value is not nest[key]}
    if not changed:
        return nest
    result = copy.copy(nest)
    for key, value in changed.items():
        result[key] = value
    return result


def _with_attributes(nest: Any, values: dict[str, Any]) -> Any:
    changed = {name: value for name, value in values.items() if value is not getattr(nest, name)}
    if not changed:
        return nest
    result = copy.copy(nest)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # The dataclass may be frozen.
    return result


def show_state_in_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook after a module's `state_dict()`, by which what it stores in half is there in fp32, as other levels and Apex have it.

    It is about the module's own tensors: each module has the hook, so that the state dict of any part of a model is in fp32, too.

    Example:
        >>> layer = nn.Linear(1, 1).half()
        >>> _ = layer.register_state_dict_post_hook(show_state_in_fp32)
        >>> layer.state_dict()["weight"].dtype, layer.weight.dtype
        (torch.float32, torch.float16)
    """
    for name in (*own_parameters(module), *own_buffers(module)):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in _HALVES:
            state_dict[prefix + name] = value.float()
