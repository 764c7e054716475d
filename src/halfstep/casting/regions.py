"""The precision that a stretch of code computes in, and how it is entered and left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, final

import torch

from halfstep._torch import own_parameters
from halfstep.casting.nests import HALVES, cast_arguments, cast_tensors, device_type_of
from halfstep.casting.operations import OperationTable, in_force_here
from halfstep.casting.weights import PureRegion, pure_dtype
from halfstep.precision import DTYPES
from halfstep.records import Precision

__all__ = ["Region"]


@final
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Region:
    """The precision that a stretch of code computes in.

    There are three kinds. In fp32 autocast is off. In bf16 and fp16 autocast is on, and chooses among its operations. In a pure region
    autocast is off, and everything that goes in is cast to its type, weights included, so that every operation runs in it.

    Attributes:
        precision: The precision.
        pure: Whether it is a pure region.
        operations: The operations that run in another precision than the region would have it; `None` where no policy has a word on any.

    Example:
        >>> region = Region(precision="bf16")
        >>> region.autocast_dtype
        torch.bfloat16
    """

    precision: Precision
    pure: bool = False
    operations: OperationTable | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the precision."""
        return DTYPES[self.precision]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast lowers to in the region; `None` where it is off."""
        if self.pure:
            return None
        if self.precision != "fp32":
            return self.dtype
        return None if self.operations is None else self.operations.autocast_dtype

    def runner(self) -> MethodType:
        """A method `run(forward, module, args, kwargs, device_type)` that calls `forward(module, *args, **kwargs)` in the region.

        What comes out is what the code around the region can use. Where autocast is on, that is anything: the next operation casts what it
        needs to, as it does with the fp32 results of its own operations. Where it is off, tensors are cast to what the code computes in.
        """
        if self.pure:
            function: Any = Region._run_pure
        elif self.operations is not None:
            function = Region._run_with_operations
        else:
            function = Region._run_fp32 if self.precision == "fp32" else Region._run_lower
        return MethodType(function, self)

    def _run_fp32(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        for weight in own_parameters(module).values():
            # Stored in half, as a frozen backbone may be, or gathered in it by fully_shard.
            if weight is not None and weight.dtype in HALVES:
                return self._run_pure(forward, module, args, kwargs, device_type)
        args, kwargs = cast_arguments(args, kwargs, torch.float32)
        device_type = device_type_of(args, kwargs) or device_type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    def _run_lower(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        if outer and torch.get_autocast_dtype(device_type) is self.dtype:
            return forward(module, *args, **kwargs)
        with _autocast(device_type, self.dtype):
            result = forward(module, *args, **kwargs)
        return result if outer else cast_tensors(result, torch.float32)

    def _run_pure(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        outside = pure_dtype()
        if outside is self.dtype:
            return forward(module, *args, **kwargs)
        args, kwargs = cast_arguments(args, kwargs, self.dtype)
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False), PureRegion(self.dtype):
            result = forward(module, *args, **kwargs)
        return result if outer else cast_tensors(result, outside or torch.float32)

    def _run_with_operations(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        if self.precision == "fp32":
            args, kwargs = cast_arguments(args, kwargs, torch.float32)
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        with in_force_here(self.operations), _autocast(device_type, self.autocast_dtype):
            result = forward(module, *args, **kwargs)
        return result if outer or self.precision == "fp32" else cast_tensors(result, torch.float32)


def _autocast(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    # Autocast finds the copies of weights that it keeps by the weight alone: in a region of one dtype within one of another it would take
    # those of the outer one. A region that switches autocast off tells by its dtype what the one around it had.
    alike = torch.compiler.is_compiling() or torch.get_autocast_dtype(device_type) is dtype or not _is_nested()
    return torch.autocast(device_type, dtype=dtype, cache_enabled=alike and torch.is_autocast_cache_enabled())


def _is_nested() -> bool:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
