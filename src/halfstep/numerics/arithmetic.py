"""Half precision as a Tensor Core computes it: values are stored in half, each operation computes in fp32 and rounds its result once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor

from halfstep._torch import (
    DispatchMode,
    OperationSchema,
    dispatch_themselves,
    kept_out_of_graphs,
    predict_dtypes,
    schema_of,
    without_autocast,
)
from halfstep.numerics.passing import passes_through
from halfstep.numerics.rounding import roundings
from halfstep.numerics.tf32 import TF32_OPERATIONS
from halfstep.precision import HALVES

__all__ = ["HalfArithmetic", "HowComputed", "how_computed"]

# How a rehearsal computes an operation on half tensors.
HowComputed: TypeAlias = Literal["fp32", "exact", "passed", "view"]

_FULL: Final = torch.float32

# What results are computed in, and what they may be rounded to.
_ROUNDED: Final = {_FULL: HALVES, torch.complex64: frozenset({torch.complex32})}

# Their argument `half_to_float` asks the kernel to return fp32 for half: it is what computing in fp32 does.
_WIDENING: Final = frozenset({"aten::_softmax", "aten::_log_softmax"})

_ATEN: Final = torch.ops.aten
_EXACT: Final = frozenset(
    {
        *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor),
        *(_ATEN.add_.Tensor, _ATEN.sub_.Tensor, _ATEN.mul_.Tensor, _ATEN.div_.Tensor),
    }
)

_DROPOUT: Final = _ATEN.native_dropout.default
_FACTORS: Final = frozenset({_ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.mul_.Tensor, _ATEN.div_.Tensor})

_Dtypes: TypeAlias = list[torch.dtype | None] | None


@final
@dataclass(frozen=True, slots=True)
class _Plan:
    """What is done with one operation.

    Attributes:
        schema: What it writes to and returns.
        passes: Whether it is left to the CPU's own kernel.
        widens: Whether its argument `half_to_float` has to be put off.
        is_exact: Whether it is one of + - * /, for which computing in fp32 and rounding is the same as rounding the exact result once,
            since fp32 has more than twice the bits of half precision (Figueroa, When is double rounding innocuous?, 1995). Any half
            kernel does that, so between half tensors of one dtype it is left to the CPU's own, which is quick; unless somebody watches,
            who is told the results before they were rounded.
    """

    schema: OperationSchema
    passes: bool
    widens: bool
    is_exact: bool


# By the identity of operations, which live as long as torch does: their own hash is computed in Python, and this is asked for each call.
_plans: Final[dict[int, _Plan]] = {}


def _plan(operation: Any) -> _Plan:
    plan = _plans.get(id(operation))
    if plan is None:
        schema = schema_of(operation)
        passes = schema.is_view or passes_through(schema.name)
        plan = _plans[id(operation)] = _Plan(schema, passes, schema.name in _WIDENING, operation in _EXACT)
    return plan


def how_computed(operation: Any) -> HowComputed:
    """How a rehearsal computes an operation on half tensors.

    Args:
        operation: An overload, such as `torch.ops.aten.add.Tensor`.

    Returns:
        `fp32` where it computes in fp32 and rounds once; `exact` for + - * /, which are left to the CPU's own kernels where these round
        once, too; `passed` for what is always left to them, since it rounds nothing; `view` where no value is touched.

    Example:
        >>> aten = torch.ops.aten
        >>> [how_computed(each) for each in (aten.mm.default, aten.mul.Tensor, aten.relu.default, aten.t.default)]
        ['fp32', 'exact', 'passed', 'view']
    """
    plan = _plan(operation)
    if plan.passes:
        return "view" if plan.schema.is_view else "passed"
    return "exact" if plan.is_exact else "fp32"


@final
class HalfArithmetic(DispatchMode):
    """While it is in force, operations on half tensors of the CPU compute in fp32, and round to what the target would return.

    Args:
        target: The device type that is asked which dtypes an operation returns: some statistics are fp32 on CUDA and half on a CPU.
        tf32: Whether fp32 matrices are rounded to TF32 before they are multiplied.
    """

    def __init__(self, *, target: str, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._tf32 = tf32
        self._dtypes: dict[Any, _Dtypes] = {}

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        if types and dispatch_themselves(types):
            return NotImplemented
        plan = _plan(func)
        if plan.passes or (plan.is_exact and not roundings.watched and not kwargs and _is_exact(func, *args)):
            return func(*args, **kwargs)
        if func is _DROPOUT and not roundings.watched and _has_half(args) and args[2] and 0 < args[1] < 1:
            return _dropout(args[0], args[1])
        if _has_half(args) or (kwargs and _has_half(kwargs.values())):
            return self._compute(func, plan, args, kwargs)
        if self._tf32 and func in TF32_OPERATIONS:
            with without_autocast("cpu"):
                return TF32_OPERATIONS[func](func, args, kwargs)
        return func(*args, **kwargs)

    def _compute(self, func: Any, plan: _Plan, args: Any, kwargs: Any) -> Any:
        wide = _Wide(args, kwargs)
        dtypes = self._returned(func, args, kwargs)
        if plan.widens:
            wide.args[-1] = False
        # Kernels call operations, too, and those would be cast: a rehearsed one is below autocast as a kernel of the target is.
        with without_autocast("cpu"):
            wide_result = func(*wide.args, **wide.kwargs)
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, name in plan.schema.written:
            before, after = (args[place], wide.args[place]) if place < len(args) else (kwargs.get(name), wide.kwargs.get(name))
            _write_back(before, after, pairs)
        result = _rounded(wide_result, dtypes, unknown=wide.dtype, pairs=pairs)
        if any(plan.schema.returned):
            result = _with_originals(result, plan.schema, args, kwargs)
        if roundings.watched:
            roundings.last = tuple(pairs)
        return result

    def _returned(self, func: Any, args: Any, kwargs: Any) -> _Dtypes:
        named = tuple((name, _signature(each)) for name, each in kwargs.items()) if kwargs else ()
        key = (id(func), tuple(map(_signature, args)), named)
        try:
            return self._dtypes[key]
        except KeyError:
            dtypes = self._dtypes[key] = predict_dtypes(func, args, kwargs, device_type=self._target)
            return dtypes


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout of a half tensor, as a kernel that keeps the factor in fp32 computes it; the CPU's own rounds that to half.

    The first product is exact and the second rounds once, so no copy in fp32 is needed.
    """
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return (x * kept).mul_(1 / (1 - p)), kept


def _is_exact(operation: Any, one: Any, other: Any) -> bool:
    """Whether both are tensors of the same dtype, or a factor is a number: the CPU's kernels keep that in fp32. A summand they round."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return False
    return one.dtype is other.dtype if isinstance(other, Tensor) else operation in _FACTORS


def _has_half(values: Iterable[Any]) -> bool:
    """Whether there is a half tensor of the CPU among them. Most operations of a step have none, so this is quick."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in HALVES and value.is_cpu:
                return True
        elif isinstance(value, list | tuple) and _has_half(value):
            return True
    return False


def _signature(value: Any) -> Any:
    """What the dtypes of results can depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value)) if value and isinstance(value[0], Tensor) else len(value)
    return value if isinstance(value, torch.dtype | bool | str) else type(value)


@final
class _Wide:
    """The arguments of an operation with half tensors in fp32, and half dtypes replaced by fp32.

    Attributes:
        half: The dtype of the first half tensor among them; `None` where there is none.
        has_full: Whether there is an fp32 tensor among them.
    """

    __slots__ = ("args", "half", "has_full", "kwargs")

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.half: torch.dtype | None = None
        self.has_full = False
        self.args = [self._widen(each) for each in args]
        self.kwargs = {name: self._widen(each) for name, each in kwargs.items()} if kwargs else kwargs

    def _widen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype is _FULL:
                self.has_full = True
            elif dtype in HALVES and value.is_cpu:
                self.half = self.half or dtype
                wide = value.to(_FULL)
                # Some kernels keep what a backward pass needs only where one can come.
                return wide.requires_grad_() if value.requires_grad else wide
            return value
        if isinstance(value, list | tuple):
            return [self._widen(each) for each in value] if value and not isinstance(value[0], int | float) else value
        return _FULL if isinstance(value, torch.dtype) and value in HALVES else value

    @property
    def dtype(self) -> torch.dtype | None:
        """What an operation on them returns as far as anybody can tell without asking: the widest dtype among them."""
        return None if self.has_full else self.half


def _write_back(before: Any, after: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Rounds what an operation has written to a copy in fp32 into the half tensor that it was to write to."""
    if isinstance(before, Tensor):
        if before is not after:
            if before.size() != after.size():
                before.resize_(after.size())  # An empty `out=` takes the size of the result.
            before.copy_(after)
            pairs.append((after, before))
    elif isinstance(before, list | tuple):
        for one, other in zip(before, after, strict=True):
            _write_back(one, other, pairs)


def _rounded(result: Any, dtypes: _Dtypes, *, unknown: torch.dtype | None, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    place = -1

    def round_each(value: Any) -> Any:
        nonlocal place
        if isinstance(value, list | tuple):
            return type(value)([round_each(each) for each in value])
        place += 1
        if not isinstance(value, Tensor) or value.dtype not in _ROUNDED:
            return value
        dtype = unknown if dtypes is None else dtypes[place] if place < len(dtypes) else None
        if dtype not in _ROUNDED[value.dtype]:
            return value
        half = value.to(dtype)
        pairs.append((value, half))
        return half

    return round_each(result)


def _with_originals(result: Any, schema: OperationSchema, args: Any, kwargs: Any) -> Any:
    """The results of an operation that returns what it has written to: the tensors that it was given, not their copies."""
    names = {name: place for place, name in schema.written}

    def original(name: str) -> Any:
        return args[names[name]] if names[name] < len(args) else kwargs[name]

    if not isinstance(result, list | tuple) or len(schema.returned) == 1:
        return original(schema.returned[0]) if schema.returned[0] is not None else result
    parts = [each if name is None else original(name) for each, name in zip(result, schema.returned, strict=True)]
    return type(result)(parts)
