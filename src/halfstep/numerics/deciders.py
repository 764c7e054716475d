"""What the autocast of another device type does to an operation, done by the autocast of the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import Overload, autocast_kernel, below_autocast, is_view, without_autocast
from halfstep.numerics.kernels import Decider
from halfstep.numerics.oplists import dtype_setters
from halfstep.precision import HALVES
from halfstep.records import Treatment

__all__ = ["WeightCache", "decider_for", "fuse_dropout"]

_DEVICE: Final = "cpu"
_FULL: Final = torch.float32


@final
class WeightCache:
    """The casts of weights that a region has made, as autocast keeps them: gradients of a weight that is used twice add in half.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> cache = WeightCache()
        >>> cache.cast(weight, torch.float16) is cache.cast(weight, torch.float16)
        True
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The cast of a weight, made when it is first asked for."""
        known = self._casts.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        # Where the first to ask needs no gradient, the next one may.
        with torch.enable_grad():
            cast = weight.to(dtype)
        self._casts[id(weight)] = (weakref.ref(weight), cast)
        return cast

    def clear(self) -> None:
        """Forgets all of them."""
        self._casts.clear()


def decider_for(overload: Overload, treatment: Treatment, *, weights: WeightCache) -> Decider:
    """What decides on an operation as the autocast of a target does.

    Args:
        overload: The operation.
        treatment: What the target does to it.
        weights: Where casts of weights are kept.

    Example:
        >>> decider = decider_for(Overload.named("aten::exp"), "fp32", weights=WeightCache())
        >>> decider(print, None, (torch.zeros(1, dtype=torch.float16),), {}).dtype
        torch.float32
    """
    if treatment == "as_is":
        return _as_is(overload)
    if treatment == "banned":
        return _banned(overload)
    if treatment == "fp32" and overload.short in dtype_setters():
        return _setting_dtype(overload)

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lower = torch.get_autocast_dtype(_DEVICE)
        dtype = lower if treatment == "lower" else _FULL if treatment == "fp32" else _widest((*args, *kwargs.values()), lower)
        cached = weights if dtype is lower and torch.is_autocast_cache_enabled() else None
        cast_args = [_cast(each, dtype, cached) for each in args]
        cast_kwargs = {name: _cast(each, dtype, cached) for name, each in kwargs.items()}
        with without_autocast(_DEVICE):
            return overload.call(*cast_args, **cast_kwargs)

    return decide


def fuse_dropout(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decides on dropout: a GPU has one kernel for it, which rounds once, where a CPU rounds the factor 1 / (1 - p) first.

    The same values are dropped, since both draw the same random numbers.
    """
    x, p, train = args
    if not train or not 0 < p < 1 or x.dtype not in HALVES or not x.numel():
        return pass_on(keyset, *args, **kwargs)
    return torch.ops.aten.native_dropout.default(x, p, train)[0]


def _is_eligible(value: Any) -> bool:
    """Whether autocast casts a value."""
    return isinstance(value, Tensor) and value.is_cpu and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype, weights: WeightCache | None) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(each, dtype, weights) for each in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    if weights is not None and value.dtype is _FULL and value.requires_grad and value.is_leaf and not is_view(value):
        return weights.cast(value, dtype)
    return value.to(dtype)


def _widest(values: tuple[Any, ...], lower: torch.dtype) -> torch.dtype:
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
    dtypes = {each.dtype for each in flat if _is_eligible(each)}
    if dtypes - {_FULL, lower}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # What torch's own kernel says.
    return _FULL if _FULL in dtypes else lower


def _as_is(overload: Overload) -> Decider:
    """An operation that only CPU autocast touches: it runs, and those that it is made of are cast, each by itself."""
    below = below_autocast(overload, device_type=_DEVICE)

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return below(keyset, *args, **kwargs)

    return decide


def _banned(overload: Overload) -> Decider:
    """An operation that is refused, in the words of the kernel that refuses it: all device types that do have one and the same."""

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return autocast_kernel(overload, device_type="cuda")(keyset, *args, **kwargs)

    return decide


def _setting_dtype(overload: Overload) -> Decider:
    """An operation that is told to compute in fp32, unless it is told a dtype already or its first argument is none that autocast casts."""

    def decide(pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        told = any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values()))
        with without_autocast(_DEVICE):
            if told or not _is_eligible(args[0]):
                return overload.call(*args, **kwargs)
            return overload.call(*_without_dtype(overload, args), **{**kwargs, "dtype": _FULL})

    return decide


def _without_dtype(overload: Overload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    place = overload.place_of("dtype")
    return args if place is None else args[:place]
