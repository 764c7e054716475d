"""What halfstep uses of torch to count casts and calls of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._torch.autocast import Overload, autocast_kernel, register_autocast_kernel, without_autocast

__all__ = ["AfterEachCast", "before_autocast_calls"]


class AfterEachCast(TorchDispatchMode):
    """A context in which a function is called after each conversion of a tensor to another dtype, forward and backward.

    Private: `torch.utils._python_dispatch.TorchDispatchMode`, as in `BeforeEachOperation`, and `torch.ops.aten._to_copy`, the operation
    that `Tensor.to`, autocast and the backward pass of both convert with. Seen on torch 2.9 to 2.13.

    Args:
        see: Called as `see(source, result)`; the two have different dtypes.
    """

    def __init__(self, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the operation, then the function where it was a conversion."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is not args[0].dtype:
            self._see(args[0], result)
        return result


def before_autocast_calls(overload: Overload, see: Callable[[], None], *, device_type: str) -> Callable[[], None]:
    """Has a function called whenever autocast meets an overload; then runs what would have run.

    No dispatch mode may be active meanwhile: for a kernel that is written in Python torch then looks up the one that was registered last,
    so that this one would call itself. And what is registered for the overload later must be taken back earlier.

    Private: as in `autocast_kernel` and `register_autocast_kernel`, which it is made of.

    Args:
        overload: The overload.
        see: The function.
        device_type: `cpu` or `cuda`.

    Returns:
        A function that takes it back.
    """
    original = autocast_kernel(overload, device_type=device_type)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        see()
        if original is not None:
            return original.call_boxed(keyset, *args, **kwargs)
        with without_autocast(device_type):
            return overload.call(*args, **kwargs)

    return register_autocast_kernel(overload, kernel, device_type=device_type)
