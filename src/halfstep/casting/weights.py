"""Weights as a pure region sees them: in its dtype, while they are stored in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from halfstep._torch import is_in_backward, own_buffers, version_of
from halfstep.casting.nests import cast_tensors

__all__ = ["PureRegion", "own_buffers_in", "pure_dtype", "runs_again", "weight_methods", "write_back"]


@final
@dataclass(frozen=True, slots=True)
class _Copy:
    """A weight or buffer, its cast, and the versions of both before anybody could write to them."""

    stored: Tensor
    cast: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, stored: Tensor, cast: Tensor) -> _Copy:
        return cls(stored, cast, (_version(stored), _version(cast)))


class _State(threading.local):
    # Set in each thread, and not in the class alone: torch.compile guards on what the instance has.
    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.casts: dict[tuple[int, torch.dtype, bool], _Copy] | None = None
        self.buffers: list[tuple[nn.Module, dict[str, _Copy]]] = []


_state: Final = _State()


def pure_dtype() -> torch.dtype | None:
    """The dtype of the pure region that the code runs in; `None` outside of one."""
    return _state.dtype


def runs_again() -> bool:
    """Whether the code may be what activation checkpointing runs again, in a backward pass and so after its region has ended.

    It runs with gradients on, as other code in a backward pass, such as hooks, does not.
    """
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and is_in_backward()


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

    def __exit__(self, *error: object) -> None:
        _state.dtype = self._outer
        if self._outer is None and _state.casts is not None:
            casts, _state.casts = _state.casts, None
            for each in casts.values():
                if _version(each.cast) != each.versions[1]:  # The code wrote to what it took for the weight.
                    write_back(each.stored, each.cast)


@contextmanager
def own_buffers_in(module: nn.Module) -> Iterator[None]:
    """A call of a module in which what the code writes into casts of its own buffers is kept, in the dtype that the buffers have.

    A call within one of the same module, as `forward` is in the call of it, goes on with the same.
    """
    if any(called is module for called, _ in _state.buffers):
        yield
        return
    seen: dict[str, _Copy] = {}
    _state.buffers.append((module, seen))
    try:
        yield
    finally:
        _state.buffers.pop()
        now = own_buffers(module)
        for name, each in seen.items():
            if now.get(name) is each.stored and _may_be_written(each, name=name):
                write_back(each.stored, each.cast)


def _may_be_written(seen: _Copy, *, name: str) -> bool:
    """Whether the code may have written to the cast of a buffer; batch normalization does not tell by the tensor's version that it did."""
    if torch.compiler.is_compiling():
        return True
    if seen.cast.layout is not torch.strided or seen.cast.is_inference():
        return False
    stored_before, cast_before = seen.versions
    if _version(seen.stored) != stored_before:  # The code wrote to the buffer itself, so that a look at the elements tells nothing.
        return version_of(seen.cast) != cast_before
    if seen.cast.device.type == "cpu":
        return not torch.equal(seen.cast, seen.stored.to(seen.cast.dtype))
    return version_of(seen.cast) != cast_before or name.startswith("running_")  # To look at the elements would wait for the device.


def write_back(stored: Any, cast: Any) -> None:
    """What an operation may have written into the cast of a tensor, such as running statistics, is written into the tensor.

    That is asked of the elements, without a wait for the device: batch normalization does not tell by the tensor's version that it wrote.
    Elements that nobody wrote to keep what the cast rounded away.
    """
    if cast is stored or not isinstance(stored, Tensor):
        return
    with torch.no_grad():
        stored.copy_(torch.where(cast == stored.to(cast.dtype), stored, cast.to(stored.dtype)))


def _version(tensor: Tensor) -> int:
    """What grows with each write; 0 where nobody counts, which is for tensors of an inference, and in traced code."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else version_of(tensor)


def _seen(stored: Any, *, sparse: bool, again: torch.dtype | None) -> Any:
    """A weight as the current region sees it; with `again`, as code that runs again outside of any region saw it."""
    dtype, casts = pure_dtype(), _state.casts
    if dtype is None and again is not None and runs_again():
        dtype = again
    if dtype is None or not isinstance(stored, Tensor) or stored.dtype is dtype:
        return stored
    if torch.compiler.is_compiling():  # The compiler casts a weight that is used twice only once by itself.
        return _cast(stored, dtype, sparse=sparse)
    if nn.parameter.is_lazy(stored):
        return stored
    if casts is None or not isinstance(stored, nn.Parameter):  # What is written to a buffer may leave its version as it was.
        return _cast(stored, dtype, sparse=sparse)
    # Without gradients a weight's cast has no history, so it is no good for a pass that needs one.
    key = (id(stored), dtype, stored.requires_grad and torch.is_grad_enabled())
    known = casts.get(key)
    if known is not None and known.versions[0] == _version(stored):
        return known.cast
    cast = _cast(stored, dtype, sparse=sparse)
    if cast is not stored:
        casts[key] = _Copy.of(stored, cast)
    return cast


@final
class _SparseCast(torch.autograd.Function):
    """A cast whose backward pass takes a sparse gradient; that of `Tensor.to` refuses it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in the dtype."""
        ctx.dtype = tensor.dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient in the tensor's own dtype."""
        return gradient.to(ctx.dtype), None


def _cast(stored: Tensor, dtype: torch.dtype, *, sparse: bool) -> Tensor:
    if sparse and stored.is_floating_point():
        cast: Tensor = _SparseCast.apply(stored, dtype)  # type: ignore[no-untyped-call]
        return cast
    return cast_tensors(stored, dtype)  # type: ignore[no-any-return]


def _seen_buffer(module: nn.Module, name: str) -> Tensor | None:
    """A module's own buffer as the call of it that is under way sees it; `None` outside of one, and for anything else."""
    dtype = pure_dtype()
    stored = own_buffers(module).get(name) if dtype is not None else None
    if dtype is None or stored is None:
        return None
    for called, buffers in reversed(_state.buffers):
        if called is module:
            known = buffers.get(name)
            if known is None or known.stored is not stored or known.cast.dtype is not dtype:
                cast: Tensor = cast_tensors(stored, dtype)
                if cast is stored:
                    return stored
                known = buffers[name] = _Copy.of(stored, cast)
            return known.cast
    return None


def weight_methods(kind: Any, *, again: torch.dtype | None) -> dict[str, Any]:
    """The methods by which a class derived from a module's shows its weights in the dtype of the region that asks for them.

    The module's own dictionaries hold what they held: `parameters()`, `state_dict()` and optimizers see the stored weights.

    Args:
        kind: The module's class.
        again: The dtype of the region that the module runs in, in a pure policy, for code that runs again after it has ended.
    """

    def get(self: nn.Module, name: str) -> Any:
        buffer = _seen_buffer(self, name)
        if buffer is not None:
            return buffer
        return _seen(kind.__getattr__(self, name), sparse=vars(self).get("sparse") is True, again=again)

    def put(self: nn.Module, name: str, value: Any) -> None:
        stored = own_buffers(self).get(name) if pure_dtype() is not None else None
        if stored is not None and isinstance(value, Tensor):
            value = cast_tensors(value, stored.dtype)
        kind.__setattr__(self, name, value)

    methods: dict[str, Any] = {"__getattr__": get, "__setattr__": put}
    if issubclass(kind, nn.RNNBase):

        def flat(self: nn.Module) -> Any:
            return [_seen(weight, sparse=False, again=again) for weight in vars(self)["_flat_weights"]]

        def put_flat(self: nn.Module, weights: Any) -> None:
            vars(self)["_flat_weights"] = weights

        methods["_flat_weights"] = property(flat, put_flat)  # A list that torch reads in place of the attributes.
    return methods
