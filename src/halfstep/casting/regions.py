"""The precision that a stretch of code computes in, and how it is entered and left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, final

import torch

from halfstep._torch import kept_out_of_graphs, own_buffers, own_parameters
from halfstep.casting.nests import Container, cast_arguments, cast_tensors, device_type_of, settle
from halfstep.casting.operations import OperationTable, in_force_here, shielding_table
from halfstep.casting.weights import PureRegion, own_buffers_in, pure_dtype, runs_again
from halfstep.precision import DTYPES, HALVES
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
        within: In a pure policy, the precision of the code that calls what runs in the region; `None` elsewhere, and for the whole model.
        is_outermost: Whether it is a policy's own region, and not one for some of its modules.
        dtype: The dtype of the precision.
        autocast_dtype: What autocast lowers to in the region; `None` where it is off.

    Example:
        >>> region = Region(precision="bf16")
        >>> region.autocast_dtype
        torch.bfloat16
    """

    precision: Precision
    pure: bool = False
    operations: OperationTable | None = None
    within: Precision | None = None
    is_outermost: bool = False
    dtype: torch.dtype = field(init=False)
    autocast_dtype: torch.dtype | None = field(init=False)
    _surrounding: torch.dtype | None = field(init=False)

    def __post_init__(self) -> None:
        # Looked up here and not where they are needed: torch.compile does not trace a read-only dictionary beside one that changes.
        object.__setattr__(self, "dtype", DTYPES[self.precision])
        object.__setattr__(self, "autocast_dtype", self._lowers_to())
        object.__setattr__(self, "_surrounding", None if self.within is None else DTYPES[self.within])

    def _lowers_to(self) -> torch.dtype | None:
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
        elif self.operations is not None and self.autocast_dtype is not None:
            function = Region._run_with_operations
        else:
            function = Region._run_fp32 if self.precision == "fp32" else Region._run_lower
        return MethodType(function, self)

    def _run_fp32(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        for weight in own_parameters(module).values():
            # Stored in half, as a frozen backbone may be, or gathered in it by fully_shard.
            if weight is not None and weight.dtype in HALVES:
                return self._run_pure(forward, module, args, kwargs, device_type)
        args, kwargs, containers = cast_arguments(args, kwargs, torch.float32)
        device_type = device_type_of(args, kwargs) or device_type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                result = forward(module, *args, **kwargs)
        else:
            result = forward(module, *args, **kwargs)
        settle(containers)
        return result

    def _run_lower(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        shield = shielding_table()
        if outer and shield is None and torch.get_autocast_dtype(device_type) is self.dtype:
            return forward(module, *args, **kwargs)
        with in_force_here(shield), _autocast(device_type, self.dtype):
            result = forward(module, *args, **kwargs)
        return result if outer else cast_tensors(result, torch.float32)

    def _run_pure(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        outside = pure_dtype()
        if outside is self.dtype:
            return self._call_pure(forward, module, args, kwargs)
        if outside is None and self._surrounding is not None and runs_again():
            outside = self._surrounding
        args, kwargs, containers = cast_arguments(args, kwargs, self.dtype)
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False), PureRegion(self.dtype):
            result = self._call_pure(forward, module, args, kwargs)
        settle(containers)
        return result if outer else cast_tensors(result, outside or torch.float32)

    def _call_pure(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if not own_buffers(module):
            return forward(module, *args, **kwargs)
        with own_buffers_in(module):
            return forward(module, *args, **kwargs)

    def _run_with_operations(self, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        if torch.compiler.is_compiling() and not self.is_outermost:
            # What is traced here meets the kernels of autocast later, when the table of another region is in force.
            return _outside_of_graphs(self._run_with_operations, forward, module, args, kwargs, device_type)
        containers: list[Container] = []
        if self.precision == "fp32":
            args, kwargs, containers = cast_arguments(args, kwargs, torch.float32)
        device_type = device_type_of(args, kwargs) or device_type
        outer = torch.is_autocast_enabled(device_type)
        assert self.autocast_dtype is not None, "the runner of a region without autocast is another"
        with in_force_here(self.operations), _autocast(device_type, self.autocast_dtype):
            result = forward(module, *args, **kwargs)
        settle(containers)
        return result if outer or self.precision == "fp32" else cast_tensors(result, torch.float32)


@kept_out_of_graphs
def _outside_of_graphs(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def _autocast(device_type: str, dtype: torch.dtype) -> torch.autocast:
    # Autocast finds the copies of weights that it keeps by the weight alone: in a region of one dtype within one of another it would take
    # those of the outer one. A region that switches autocast off tells by its dtype what the one around it had.
    alike = torch.compiler.is_compiling() or torch.get_autocast_dtype(device_type) is dtype or not _is_nested()
    return torch.autocast(device_type, dtype=dtype, cache_enabled=alike and torch.is_autocast_cache_enabled())


def _is_nested() -> bool:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
