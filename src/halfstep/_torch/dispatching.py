"""What halfstep uses of torch to stand between autograd and the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from halfstep._torch.autocast import STATISTICS

__all__ = [
    "DispatchMode",
    "OperationSchema",
    "WatchingMode",
    "WeightCacheClears",
    "dispatch_themselves",
    "insert_mode",
    "is_view",
    "predict_dtypes",
    "remove_mode",
    "schema_of",
]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base of contexts that meet every operation below autograd.

    A class that derives from it marks its `__torch_dispatch__` with `kept_out_of_graphs`.

    Private: `torch.utils._python_dispatch.TorchDispatchMode`, and `_should_skip_dynamo`, which wraps each call to keep it out of graphs;
    that costs more than the rest of the call. Seen on torch 2.13; where torch does not ask, it wraps.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class WatchingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """The base of modes that only watch, and that see operations before those modes that change what they compute."""


def dispatch_themselves(types: Iterable[Any]) -> bool:
    """Whether a tensor of one of these classes dispatches by itself, as a DTensor does: operations on its parts come by later.

    Private: `torch._C._disabled_torch_dispatch_impl`, what a class has that does not. Seen on torch 2.9 to 2.13.
    """
    return any(each.__torch_dispatch__ not in _PLAIN for each in types)


_PLAIN = (Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


@final
@dataclass(frozen=True, slots=True)
class OperationSchema:
    """What the schema of an operation says of its arguments and results.

    Attributes:
        name: Such as `aten::add_`, without the overload.
        is_view: Whether it returns views of what it is given.
        written: The arguments that it writes to, by place and name; with those that batch and instance norm write to without saying so.
        returned: For each result, the name of the argument that it is, or `None` where it is a new tensor.
    """

    name: str
    is_view: bool
    written: tuple[tuple[int, str], ...]
    returned: tuple[str | None, ...]


@cache
def schema_of(operation: Any) -> OperationSchema:
    """The schema of an operation such as `torch.ops.aten.add_.Tensor`.

    Private: `OpOverload._schema`. Seen on torch 2.9 to 2.13.
    """
    schema = operation._schema
    written, sets = [], {}
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or (argument.name in STATISTICS and alias is None):
            written.append((place, argument.name))
        if alias is not None and alias.is_write:
            sets.update(dict.fromkeys(alias.before_set, argument.name))
    returned: list[str | None] = []
    is_a_view = torch.Tag.inplace_view in operation.tags
    for each in schema.returns:
        alias = each.alias_info
        returned.append(None if alias is None else next((sets[name] for name in alias.before_set if name in sets), None))
        is_a_view = is_a_view or (alias is not None and not alias.is_write)
    return OperationSchema(schema.name, is_a_view, tuple(written), tuple(returned))


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view in the eyes of autograd.

    Private: `Tensor._is_view`, documented nowhere, used all over torch. Seen on torch 2.9 to 2.13.
    """
    return tensor._is_view()


def predict_dtypes(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], *, device_type: str) -> list[torch.dtype | None] | None:
    """The dtypes of what an operation would return on a device, which need not exist here; it does not run.

    Private: `torch._subclasses.fake_tensor.FakeTensorMode`, which torch.compile and torch.export are built on. Seen on torch 2.9 to 2.13.

    Args:
        operation: Such as `torch.ops.aten.add.Tensor`.
        args: What it is given; tensors of any device.
        kwargs: The same by name.
        device_type: Such as `cuda`. Where torch cannot tell for that, as for batch norm on a build without CUDA, the answer is that for a
            device which is no CPU.

    Returns:
        A dtype for each result, in order, those in lists one by one; `None` for a result that is no tensor. `None` where nobody knows,
        such as for an operation whose results depend on values.
    """
    for device in dict.fromkeys((device_type, "cpu" if device_type == "cpu" else "meta")):
        try:
            with _silent(), _disable_current_modes(), FakeTensorMode(), torch.no_grad():
                results = operation(*_fake(list(args), device), **{name: _fake(each, device) for name, each in kwargs.items()})
        except Exception:
            continue  # Whatever goes wrong here says only that the answer is not known.
        parts = results if isinstance(results, list | tuple) else [results]
        flat = [each for part in parts for each in (part if isinstance(part, list | tuple) else [part])]
        return [each.dtype if isinstance(each, Tensor) else None for each in flat]
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """A block in which fake tensors do not log what fails: where an operation is called wrongly, its own error says so."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = was_disabled


_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _fake(value: Any, device_type: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device_type)
    if isinstance(value, list | tuple):
        return type(value)(_fake(each, device_type) for each in value)
    return torch.device(device_type) if isinstance(value, torch.device) else value


def insert_mode(mode: TorchDispatchMode, *, below: type[TorchDispatchMode]) -> None:
    """Puts a dispatch mode in force, below the modes of a class if there are such on the top of the stack: those see operations first.

    Private: the stack of modes in `torch.utils._python_dispatch`. Seen on torch 2.9 to 2.13.
    """
    above = []
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], below):
        above.append(_pop_mode())
    _push_mode(mode)
    for each in reversed(above):
        _push_mode(each)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Takes a dispatch mode out of the stack, wherever in it it is."""
    above = []
    while (stack := _get_current_dispatch_mode_stack()) and stack[-1] is not mode:
        above.append(_pop_mode())
    if stack:
        _pop_mode()
    for each in reversed(above):
        _push_mode(each)


class WeightCacheClears:
    """While it is open, a function is called whenever autocast forgets the weights that it has cast: at the end of an outermost region.

    `torch.autocast` calls `torch.clear_autocast_cache` through the module, so a function in its place is met; nothing else tells.

    Args:
        see: What is called, before torch's own function.
    """

    def __init__(self, see: Callable[[], None]) -> None:
        self._original = torch.clear_autocast_cache
        self._see = see
        setattr(torch, "clear_autocast_cache", self._clear)  # noqa: B010 - a type checker forbids the assignment

    def _clear(self) -> None:
        self._see()
        self._original()

    def close(self) -> None:
        """Puts torch's own function back."""
        setattr(torch, "clear_autocast_cache", self._original)  # noqa: B010
