"""What halfstep uses of torch to trace operations: the mode that sees them, autograd's numbers and the identity of memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, final

import torch
import torch.autograd.graph
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from halfstep._torch.autocast import kept_out_of_graphs
from halfstep._torch.dispatching import WatchingMode, dispatch_themselves

__all__ = [
    "ACCUMULATION",
    "ENGINE_CODE",
    "OperationMode",
    "compiles_module",
    "has_schema",
    "hold_storage",
    "next_node_number",
    "node_name",
    "node_number",
    "release_storages",
    "storage_key",
    "storage_keys",
    "untraced",
]


@final
class OperationMode(WatchingMode):
    """A context in which each operation of torch is run by a function, forward and backward.

    Operations on tensors of classes that know how to dispatch themselves, such as a DTensor, are left to those: what they are made of
    comes by on its own.

    Private: `supports_higher_order_operators` of a dispatch mode, without which operators such as `torch.cond` are refused; the classes of
    tensors that torch's own tracers use, `torch._subclasses.FakeTensor` and `FunctionalTensor`; and `sys._getframe`, since
    `inspect.currentframe` takes longer. Seen on torch 2.13.

    Args:
        run: Called as `run(operation, args, kwargs, frame)` with the frame that calls the operation, `None` where no Python code does;
            returns what the operation returns.
        pass_by: Called in the same way with those that are left to their tensors, and returns nothing.
    """

    supports_higher_order_operators = True

    def __init__(
        self, run: Callable[[Any, Any, Any, FrameType | None], Any], *, pass_by: Callable[[Any, Any, Any, FrameType | None], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._pass_by = pass_by

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Has the function run the operation."""
        kwargs = kwargs or {}
        if types and dispatch_themselves(types):
            self._pass_by(func, args, kwargs, sys._getframe().f_back)
            # Tensors that stand for others while something is traced or compiled belong to modes of torch's own, below this one.
            return func(*args, **kwargs) if any(issubclass(each, _STAND_INS) for each in types) else NotImplemented
        return self._run(func, args, kwargs, sys._getframe().f_back)


def has_schema(operation: Any) -> bool:
    """Whether an operation has a schema: higher-order operators, such as flex attention, have none.

    Private: `torch._ops.OpOverload`. Seen on torch 2.9 to 2.13.
    """
    return isinstance(operation, torch._ops.OpOverload)


_STAND_INS: Final = (FakeTensor, FunctionalTensor)


class _Guards(threading.local):
    """One guard for each thread: to make one for each operation takes as long as to use it.

    Private: `torch._C._ExcludeDispatchKeyGuard`, and the sets of keys that lie above the kernels: autograd's, autocast's and those of
    dispatch modes. Seen on torch 2.13.
    """

    def __init__(self) -> None:
        key = torch._C.DispatchKey
        above = torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(key.ADInplaceOrView)
        modes = torch._C.DispatchKeySet(key.Python) | torch._C.DispatchKeySet(key.PythonTLSSnapshot)
        self.guard = torch._C._ExcludeDispatchKeyGuard(above | modes)


_GUARDS: Final = _Guards()


def untraced() -> Any:
    """A context in which operations go straight to their kernels: no dispatch mode sees them, no autograd, no autocast.

    It cannot be entered twice at once in one thread.
    """
    return _GUARDS.guard


# The number of the nodes that add to a parameter's gradient.
ACCUMULATION: Final = 2**64 - 1


# Returns the number that the next node of autograd that is made in this thread will have.
# Private: `torch._C._autograd._get_sequence_nr`. Seen on torch 2.9 to 2.13.
next_node_number: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr


def node_number(node: Any) -> int:
    """The number of a node of autograd, which counts the nodes that were made in its thread.

    Private: `Node._sequence_nr`. Seen on torch 2.9 to 2.13.
    """
    number: int = node._sequence_nr()
    return number


def node_name(node: Any) -> str:
    """The name of a node of autograd, such as `AddmmBackward0`."""
    name: str = node.name()
    return name.removeprefix("torch::autograd::")


# The code that calls autograd's engine: `backward()` and `torch.autograd.grad` both go through it.
# Private: `torch.autograd.graph._engine_run_backward`. Seen on torch 2.9 to 2.13.
ENGINE_CODE: Final = torch.autograd.graph._engine_run_backward.__code__


def storage_key(tensor: torch.Tensor) -> int | None:
    """A number for the memory that a tensor lies in, the same for all of its views; `None` for one without memory, such as a sparse one.

    It is given to other memory later, unless `hold_storage` holds it.

    Private: `UntypedStorage._cdata`. Seen on torch 2.9 to 2.13.
    """
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return key


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int | None]:
    """The `storage_key` of each tensor, in half the time.

    Private: `UntypedStorage._cdata`, as above.
    """
    try:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
    except (NotImplementedError, RuntimeError):
        return [storage_key(tensor) for tensor in tensors]


def hold_storage(tensor: torch.Tensor) -> int:
    """Keeps the number of a tensor's memory from being given to other memory, without keeping the memory itself.

    Private: `UntypedStorage._weak_ref`, a pointer that keeps the address alone. Seen on torch 2.9 to 2.13.

    Returns:
        The tensor's `storage_key`, which `release_storages` takes, once for each call.
    """
    storage: Any = tensor.untyped_storage()
    key: int = storage._weak_ref()
    return key


def release_storages(held: Iterable[int]) -> None:
    """Lets the numbers go that `hold_storage` has held.

    Private: `UntypedStorage._free_weak_ref`, as above.
    """
    free: Any = torch.UntypedStorage._free_weak_ref
    for key in held:
        free(key)


def compiles_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` or `Module.compile` would compile a call of a module, or of one in it, as things are.

    Private: `torch._dynamo.eval_frame`, asked only where it is loaded, of which `OptimizedModule` and the stance that
    `torch.compiler.set_stance` sets; and `Module._compiled_call_impl`. Seen on torch 2.13.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or getattr(getattr(frames, "_stance", None), "stance", "") == "force_eager":
        return False
    kind = frames.OptimizedModule
    return any(isinstance(each, kind) or getattr(each, "_compiled_call_impl", None) is not None for each in module.modules())
