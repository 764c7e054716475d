"""What halfstep asks of torch's autocast kernels: what they do to what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from halfstep._torch.autocast import Overload
from halfstep.errors import HalfstepError
from halfstep.records import Treatment

__all__ = ["probe_autocast_kernel"]

# A dispatch key that lies above that of autocast and that nothing uses but torch's own C++ tests.
_KEY = "TESTING_ONLY_GenericMode"


class _Met(BaseException):
    def __init__(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.operation = operation
        self.tensors = [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, torch.Tensor)]


def _flat(values: list[Any]) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]


def probe_autocast_kernel(overload: Overload, kernel: Callable[..., Any]) -> Treatment:
    """What the CPU's autocast does to an operation.

    Args:
        overload: The operation.
        kernel: Autocast's kernel for it, as `autocast_kernel` gives it.

    The kernel is called with tensors of one element, while a dispatch key is switched on in this thread that lies above all others.
    Whatever the kernel calls is met there, and nothing runs: either a conversion, which tells what it casts to, or the operation itself.

    Private: the dispatch keys, `torch._C._ForceDispatchKeyGuard`, `torch.utils._python_dispatch._disable_current_modes`, and
    `OpOverload._schema`. Seen on torch 2.13.

    Raises:
        HalfstepError: The kernel does something that halfstep knows no name for.
    """
    _catch_all()
    half, full = torch.float16, torch.float32
    try:
        narrowed = _first_cast(overload, kernel, (full,)) is half
        widened = _first_cast(overload, kernel, (half,)) is full
        promoted = _first_cast(overload, kernel, (half, full)) is full
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return "banned"
        raise HalfstepError(
            f"What CPU autocast of torch {torch.__version__} does to {overload.name} cannot be found out: {error}"
        ) from error
    treatments: dict[tuple[bool, bool, bool], Treatment] = {
        (True, False, False): "lower",
        (False, True, True): "fp32",
        (False, False, True): "promote",
        (False, False, False): "as_is",
    }
    found = treatments.get((narrowed, widened, promoted))
    if found is None:
        raise HalfstepError(f"CPU autocast of torch {torch.__version__} does something to {overload.name} that halfstep has no name for.")
    return found


def _first_cast(overload: Overload, kernel: Callable[..., Any], dtypes: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """The dtype that the kernel first casts to, given tensors of these dtypes in turns; `None` when it casts none.

    Private: as `probe_autocast_kernel` says.
    """
    args, kwargs = _arguments(overload, dtypes)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    included = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        # A mode of the caller's would be asked for a kernel of its own for what is caught here.
        with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(included, torch._C._dispatch_tls_local_exclude_set()):
            kernel(keys, *args, **kwargs)
    except _Met as met:
        if met.operation is not torch.ops.aten.to.dtype:
            return None
        # The conversion is met before its result exists; from the one half dtype in play it goes to fp32, and from fp32 to that.
        return torch.float32 if met.tensors[0].dtype is torch.float16 else torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)
    raise HalfstepError(f"CPU autocast of torch {torch.__version__} does not call {overload.name} where halfstep can see it.")


@cache
def _catch_all() -> Any:
    """Has whatever is called raise `_Met`, where the key is switched on, which is nowhere but here."""
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(_meet, _KEY)
    return library


def _meet(operation: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise _Met(operation, args, kwargs)


# What stands for an argument that is no tensor, by the type that its schema names.
_NUMBERS = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "Scalar": 1.0, "bool": False, "str": "sum", "Device": torch.device("cpu")}


def _arguments(overload: Overload, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Any], dict[str, Any]]:
    """What the schema of an operation can be called with; its values mean nothing.

    Private: `OpOverload._schema`.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    made = 0
    for argument in overload.call._schema.arguments:
        kind = str(argument.type)
        value: Any
        if kind == "Tensor":
            value = torch.ones(1, dtype=dtypes[made % len(dtypes)])
            made += 1
        elif kind == "List[Tensor]":
            value = [torch.ones(1, dtype=dtype) for dtype in dtypes]
        elif kind.startswith("List["):
            value = [_NUMBERS[kind[5:-1]]]
        else:
            value = None if kind.startswith("Optional[") else _NUMBERS[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs
