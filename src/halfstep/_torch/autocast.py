"""What halfstep uses of torch's dispatcher, autocast kernels and compiler."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._functorch.config

__all__ = [
    "FreshTraces",
    "Overload",
    "aten_operations",
    "autocast_kernel",
    "functional_overloads",
    "register_autocast_kernel",
    "without_autocast",
]


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload of an aten operation.

    Attributes:
        name: Such as `aten::softmax.int`.
        call: Calls it.
    """

    name: str
    call: Any

    @property
    def short(self) -> str:
        """The name as `torch.library` takes it, such as `softmax.int`."""
        return self.name.removeprefix("aten::")

    @classmethod
    def named(cls, name: str) -> Overload:
        """The overload of a name."""
        operation, _, overload = name.removeprefix("aten::").partition(".")
        return cls(name, getattr(getattr(torch.ops.aten, operation), overload or "default"))


@cache
def aten_operations() -> frozenset[str]:
    """The names of all aten operations, without overloads, such as `softmax`."""
    return frozenset(name.partition(".")[0] for name in _dispatched())


@cache
def _dispatched() -> frozenset[str]:
    """The names of all overloads of aten, such as `softmax.int`.

    Private: `torch._C._dispatch_get_all_op_names`, because `torch.ops.aten` lists only those that somebody has asked for, with some
    among them that the dispatcher does not know. Seen on torch 2.9 to 2.13.
    """
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


@cache
def functional_overloads(operation: str) -> tuple[Overload, ...]:
    """The overloads of an aten operation that take tensors and write to none of them, which are those that autocast may cast.

    Private: `OpOverload._schema`, which tells what an overload takes and writes to. Seen on torch 2.9 to 2.13.

    Args:
        operation: Such as `softmax`, or with an overload, such as `softmax.int`.
    """
    name, _, only = operation.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    found = []
    for overload in () if packet is None else packet.overloads():
        schema = getattr(packet, overload)._schema
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        full = name if overload == "default" else f"{name}.{overload}"
        if takes_tensors and not schema.is_mutable and only in ("", overload) and full in _dispatched():
            found.append(Overload.named(f"aten::{full}"))
    return tuple(found)


def autocast_kernel(overload: Overload, *, device_type: str) -> Any:
    """What torch runs when autocast meets an overload, with a method `call_boxed`; `None` where autocast has nothing to say of it.

    Private: `torch._C._dispatch_has_kernel_for_dispatch_key`, because the public `torch.library.get_kernel` also returns the key's
    fallback, which cannot be called. Seen on torch 2.13.
    """
    key = f"Autocast{device_type.upper()}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name, key):
        return None
    return torch.library.get_kernel(overload.call, key)


def register_autocast_kernel(overload: Overload, kernel: Callable[..., Any], *, device_type: str) -> Callable[[], None]:
    """Has a function run when autocast meets an overload, in place of torch's own kernel.

    Private: `torch.library.Library._destroy`, the only way to take a kernel back. Seen on torch 2.9 to 2.13.

    Args:
        overload: The overload.
        kernel: Called as `kernel(keyset, *args, **kwargs)`.
        device_type: `cpu` or `cuda`.

    Returns:
        A function that takes it back.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # That torch's own kernel is overridden is the intention.
        library.impl(overload.short, kernel, f"Autocast{device_type.upper()}", with_keyset=True)
    take_back: Callable[[], None] = library._destroy
    return take_back


def without_autocast(device_type: str) -> Any:
    """A region in which autocast is passed over, as it is inside of torch's own autocast kernels; it costs less than `torch.autocast`.

    Private: `torch._C._ExcludeDispatchKeyGuard`. Seen on torch 2.9 to 2.13.
    """
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS[device_type])


_AUTOCAST_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
}


class FreshTraces:
    """While one of these is open, `torch.compile` takes no traced graph from disk; when it opens and closes, compiled code is forgotten.

    A graph that was traced holds the casts that autocast made then, and its key in torch's cache does not tell by which kernels.

    Private: `torch._functorch.config.enable_autograd_cache`. Seen on torch 2.9 to 2.13.
    """

    _open = 0
    _before = True

    def __init__(self) -> None:
        config: Any = torch._functorch.config
        if not FreshTraces._open:
            FreshTraces._before, config.enable_autograd_cache = config.enable_autograd_cache, False
        FreshTraces._open += 1
        _forget_compiled()

    def close(self) -> None:
        """Allows it again."""
        config: Any = torch._functorch.config
        FreshTraces._open -= 1
        if not FreshTraces._open:
            config.enable_autograd_cache = FreshTraces._before
        _forget_compiled()


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
