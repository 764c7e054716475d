"""Weights as a pure region sees them: in its dtype, while they are stored in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from halfstep._torch import own_buffers, version_of
from halfstep.casting.nests import cast_tensors

__all__ = ["PureRegion", "pure_dtype", "recomputed_in", "weight_methods"]


class _State(threading.local):
    dtype: torch.dtype | None = None
    casts: dict[tuple[int, torch.dtype, bool], tuple[Tensor, Tensor, int, int]] | None = None


_state: Final = _State()

# Backward passes that may run pure code again, which began in a region that has ended. It is no thread's: they have threads of their own.
_recomputed: Final[list[torch.dtype]] = []


def pure_dtype() -> torch.dtype | None:
    """The dtype of the pure region that the code runs in; `None` outside of one."""
    return _state.dtype or (_recomputed[-1] if _recomputed else None)


@contextmanager
def recomputed_in(dtype: torch.dtype) -> Iterator[None]:
    """A backward pass in which checkpointed code runs again as it ran in a pure region of a dtype."""
    _recomputed.append(dtype)
    try:
        yield
    finally:
        _recomputed.remove(dtype)


@final
class PureRegion:
    """The inside of a pure region. Each weight is cast once in it, when it is first used.

    Args:
        dtype: What weights and buffers are seen in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._outer, _state.dtype = _state.dtype, self._dtype
        if self._outer is None:
            _state.casts = {}

    def __exit__(self, *_: object) -> None:
        _state.dtype = self._outer
        if self._outer is None and _state.casts is not None:
            casts, _state.casts = _state.casts, None
            _write_back(list(casts.values()))


def _write_back(casts: list[tuple[Tensor, Tensor, int, int]]) -> None:
    """What the code wrote into the cast of a buffer, such as a running statistic, is written into the buffer."""
    for stored, cast, _, version in casts:
        if version_of(cast) != version and not cast.requires_grad:
            with torch.no_grad():
                stored.copy_(cast)


def _seen(stored: Any) -> Any:
    """A weight as the current region sees it."""
    dtype, casts = pure_dtype(), _state.casts
    if dtype is None or not isinstance(stored, Tensor) or stored.dtype is dtype:
        return stored
    if torch.compiler.is_compiling():  # The compiler casts a weight that is used twice only once by itself.
        return cast_tensors(stored, dtype)
    if nn.parameter.is_lazy(stored):
        return stored
    if casts is None:  # What a backward pass runs again must not outlive its part of it.
        return cast_tensors(stored, dtype)
    # Without gradients a weight's cast has no history, so it is no good for a pass that needs one.
    key = (id(stored), dtype, stored.requires_grad and torch.is_grad_enabled())
    known = casts.get(key)
    if known is not None and known[2] == version_of(stored):
        return known[1]
    cast = cast_tensors(stored, dtype)
    if cast is not stored:
        casts[key] = (stored, cast, version_of(stored), version_of(cast))
    return cast


def weight_methods(kind: Any) -> dict[str, Any]:
    """The methods by which a class derived from a module's shows its weights in the dtype of the region that asks for them.

    The module's own dictionaries hold what they held: `parameters()`, `state_dict()` and optimizers see the stored weights.
    """

    def get(self: nn.Module, name: str) -> Any:
        return _seen(kind.__getattr__(self, name))

    def put(self: nn.Module, name: str, value: Any) -> None:
        stored = own_buffers(self).get(name) if pure_dtype() is not None else None
        if stored is not None and isinstance(value, Tensor):
            value = cast_tensors(value, stored.dtype)
        kind.__setattr__(self, name, value)

    methods: dict[str, Any] = {"__getattr__": get, "__setattr__": put}
    if issubclass(kind, nn.RNNBase):

        def flat(self: nn.Module) -> Any:
            return [_seen(weight) for weight in vars(self)["_flat_weights"]]

        def put_flat(self: nn.Module, weights: Any) -> None:
            vars(self)["_flat_weights"] = weights

        methods["_flat_weights"] = property(flat, put_flat)  # A list that torch reads in place of the attributes.
    return methods
