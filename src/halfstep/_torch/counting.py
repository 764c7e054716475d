"""What halfstep uses of torch to count casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["AfterEachCast"]


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
