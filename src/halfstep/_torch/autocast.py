"""What halfstep uses of torch's dispatcher, autocast kernels and compiler."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
import torch._functorch.config
import torch._guards

from halfstep.errors import HalfstepError

__all__ = [
    "STATISTICS",
    "FreshTraces",
    "HeldSetting",
    "Overload",
    "all_overloads",
    "aten_operations",
    "autocast_kernel",
    "backward_node",
    "below_autocast",
    "functional_overloads",
    "has_autocast_kernel",
    "is_being_traced",
    "is_in_backward",
    "kept_out_of_graphs",
    "register_autocast_kernel",
    "without_autocast",
]


# The arguments that batch and instance norm write to, and whose schemas do not say so.
STATISTICS = ("running_mean", "running_var")


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
    def statistics(self) -> tuple[tuple[int, str], ...]:
        """The arguments that it writes to although its schema does not say so, by place and name: those of batch and instance norm.

        Private: `OpOverload._schema`, as in `functional_overloads`.
        """
        arguments = enumerate(self.call._schema.arguments)
        return tuple((place, each.name) for place, each in arguments if each.name in STATISTICS)

    @property
    def short(self) -> str:
        """The name as `torch.library` takes it, such as `softmax.int`."""
        return self.name.removeprefix("aten::")

    def place_of(self, argument: str) -> int | None:
        """The place of an argument that can be given without its name; `None` where it cannot.

        Private: `OpOverload._schema`, as in `functional_overloads`.
        """
        arguments = enumerate(self.call._schema.arguments)
        return next((place for place, each in arguments if each.name == argument and not each.kwarg_only), None)

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
def all_overloads() -> tuple[Overload, ...]:
    """All overloads of aten, sorted by their names."""
    return tuple(Overload.named(f"aten::{name}") for name in sorted(_dispatched()))


@cache
def _dispatched() -> frozenset[str]:
    """The names of all overloads of aten, such as `softmax.int`.

    Private: `torch._C._dispatch_get_all_op_names`, because `torch.ops.aten` lists only those that somebody has asked for, with some
    among them that the dispatcher does not know. Seen on torch 2.9 to 2.13.
    """
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


_CONVERSIONS = frozenset({"_to_copy", "_autocast_to_full_precision", "_autocast_to_reduced_precision"})


@cache
def functional_overloads(operation: str) -> tuple[Overload, ...]:
    """The overloads of an aten operation that take tensors, write to none of them and return no view of any.

    Those are the ones that may be cast. Conversions are not among them, since a cast would be made of them.

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
        returns_views = any(each.alias_info is not None for each in schema.returns)
        full = name if overload == "default" else f"{name}.{overload}"
        if (
            takes_tensors
            and not schema.is_mutable
            and not returns_views
            and name not in _CONVERSIONS
            and only in ("", overload)
            and full in _dispatched()
        ):
            found.append(Overload.named(f"aten::{full}"))
    return tuple(found)


def has_autocast_kernel(overload: Overload, *, device_type: str) -> bool:
    """Whether autocast has a say in an overload.

    Private: `torch._C._dispatch_has_kernel_for_dispatch_key`. Seen on torch 2.9 to 2.13.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name, f"Autocast{device_type.upper()}")


def autocast_kernel(overload: Overload, *, device_type: str) -> Callable[..., Any]:
    """What runs when autocast meets an overload, called as `kernel(keyset, *args, **kwargs)`.

    Where autocast has no say, that is what lies below it, because `torch.library.get_kernel` gives autocast's fallback in that case, which
    cannot be called.

    Raises:
        HalfstepError: This torch does not give its kernels away.
    """
    key = f"Autocast{device_type.upper()}"
    if has_autocast_kernel(overload, device_type=device_type):
        if not hasattr(torch.library, "get_kernel"):
            raise HalfstepError(
                f"An override of an operation needs torch.library.get_kernel, which torch {torch.__version__} does not have. Use a newer "
                "torch, or override the module that calls the operation."
            )
        kernel: Callable[..., Any] = torch.library.get_kernel(overload.call, key).call_boxed
        return kernel
    return below_autocast(overload, device_type=device_type)


def below_autocast(overload: Overload, *, device_type: str) -> Callable[..., Any]:
    """What an operation would be without a kernel of autocast's, called as `kernel(keyset, *args, **kwargs)`.

    Autocast stays on for the operations that it is made of.

    Private: `torch._C._dispatch_keyset_full_after` and `OpOverload.redispatch`. Seen on torch 2.13.
    """
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def pass_on(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return overload.call.redispatch(keyset & below, *args, **kwargs)

    return pass_on


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
        library.impl(overload.short, kept_out_of_graphs(kernel), f"Autocast{device_type.upper()}", with_keyset=True)
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


def is_being_traced() -> bool:
    """Whether `torch.compile` is tracing in this thread, asked by code that the tracer itself runs, and not by what it traces.

    Private: `torch._guards.TracingContext`, because `torch.compiler.is_compiling()` is true in traced code alone. Seen on torch 2.9 to
    2.13.
    """
    return torch._guards.TracingContext.try_get() is not None


_F = TypeVar("_F", bound=Callable[..., Any])


def kept_out_of_graphs(function: _F) -> _F:
    """A function that `torch.compile` does not trace, nor what it calls.

    Private: `set_code_exec_strategy` and the enumerations that it takes, in `torch._C._dynamo.eval_frame`, and the mark
    `_torchdynamo_disable`, because the public `torch.compiler.disable` imports the compiler, which takes a second. Seen on torch 2.13; a
    torch without them gets the public one.
    """
    if not hasattr(function, "__code__"):  # One that is not written in Python.
        return function
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        disabled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    marked: Any = function
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP))
    marked._torchdynamo_disable = True
    return function


def is_in_backward() -> bool:
    """Whether a backward pass is under way in this thread, in which checkpointed code runs again."""
    return backward_node() is not None


# Returns the node of autograd that runs in this thread; `None` outside of a backward pass.
# Private: `torch._C._current_autograd_node`. Seen on torch 2.9 to 2.13.
backward_node: Callable[[], Any] = torch._C._current_autograd_node


class HeldSetting:
    """A setting of the ahead-of-time tracer of `torch.compile` that has another value while one of these is open.

    Private: `torch._functorch.config`. Seen on torch 2.9 to 2.13; a torch without the setting is left alone.

    Args:
        name: Of the setting.
        value: While it is held; the same for all that hold it.
    """

    _held: ClassVar[dict[str, tuple[int, Any]]] = {}

    def __init__(self, name: str, value: object) -> None:
        self._name = name
        config: Any = torch._functorch.config
        self._is_open = hasattr(config, name)
        if self._is_open:
            count, before = HeldSetting._held.get(name, (0, getattr(config, name)))
            HeldSetting._held[name] = (count + 1, before)
            setattr(config, name, value)

    def close(self) -> None:
        """Gives the setting back its value, unless another one holds it. The second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        count, before = HeldSetting._held.pop(self._name)
        if count > 1:
            HeldSetting._held[self._name] = (count - 1, before)
        else:
            setattr(torch._functorch.config, self._name, before)


class FreshTraces:
    """While one of these is open, `torch.compile` takes no traced graph from disk; when it opens and closes, compiled code is forgotten.

    A graph that was traced holds the casts that autocast made then, and its key in torch's cache does not tell by which kernels.

    Private: the setting `enable_autograd_cache`, as in `HeldSetting`.
    """

    def __init__(self) -> None:
        self._setting = HeldSetting("enable_autograd_cache", value=False)
        _forget_compiled()

    def close(self, *, forgets: bool = True) -> None:
        """Allows it again, and forgets compiled code; that cannot be done at any moment, such as in a collection of garbage."""
        self._setting.close()
        if forgets:
            _forget_compiled()


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
