"""Who decides what autocast does to an operation, when several want a say: policies above, a rehearsal below them, and torch at the end.

A kernel is registered once for each operation and device type, however many decide. Under a dispatch mode torch calls whichever function
was registered last for an operation, also after that was taken back, so two registrations for one operation would be confused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, final

from halfstep._torch import Overload, autocast_kernel, has_autocast_kernel, register_autocast_kernel

__all__ = ["Decider", "decide_operation", "torch_kernel"]


class Decider(Protocol):
    """What may stand in for autocast's kernel of one operation."""

    def __call__(self, pass_on: Callable[..., Any], keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation, or leaves it to the next one by `pass_on(keyset, *args, **kwargs)`."""


@final
@dataclass(slots=True)
class _Operation:
    """One operation on one device type, and who decides on it, the first one last."""

    take_back: Callable[[], None]
    original: Callable[..., Any]
    is_fallback: bool
    deciders: list[Decider] = field(default_factory=list)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(len(self.deciders), keyset, args, kwargs)

    def run(self, place: int, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not place:
            return self.original(keyset, *args, **kwargs)

        def pass_on(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            return self.run(place - 1, keyset, args, kwargs)

        return self.deciders[place - 1](pass_on, keyset, args, kwargs)


_operations: Final[dict[tuple[str, str], _Operation]] = {}


def decide_operation(overload: Overload, decider: Decider, *, device_type: str, last: bool = False) -> Callable[[], None]:
    """Gives somebody a say in what autocast does to an operation, in this whole process.

    Args:
        overload: The operation.
        decider: Is asked before those that came earlier.
        device_type: `cpu` or `cuda`.
        last: Is asked after all others, instead.

    Returns:
        A function that takes it back.

    Example:
        >>> import torch
        >>> def refuse(pass_on, keyset, args, kwargs):
        ...     raise ValueError("not here")
        >>> take_back = decide_operation(Overload.named("aten::relu"), refuse, device_type="cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     torch.ones(1).relu()
        Traceback (most recent call last):
        ...
        ValueError: not here
        >>> take_back()
    """
    key = (overload.name, device_type)
    operation = _operations.get(key)
    if operation is None:
        operation = _operations[key] = _registered(overload, device_type)
    operation.deciders.insert(0 if last else len(operation.deciders), decider)

    def take_back() -> None:
        operation.deciders.remove(decider)
        if not operation.deciders:
            del _operations[key]
            operation.take_back()

    return take_back


def torch_kernel(overload: Overload, *, device_type: str) -> Callable[..., Any] | None:
    """The kernel that torch's autocast has for an operation, whoever has a say in it now; `None` where it has none.

    Example:
        >>> torch_kernel(Overload.named("aten::relu"), device_type="cpu") is None
        True
    """
    operation = _operations.get((overload.name, device_type))
    if operation is not None:
        return None if operation.is_fallback else operation.original
    original, is_fallback = _original(overload, device_type)
    return None if is_fallback else original


@cache
def _original(overload: Overload, device_type: str) -> tuple[Callable[..., Any], bool]:
    """What runs where nobody has a say, and whether that is for want of a kernel; asked before anybody has."""
    return autocast_kernel(overload, device_type=device_type), not has_autocast_kernel(overload, device_type=device_type)


def _registered(overload: Overload, device_type: str) -> _Operation:
    original, is_fallback = _original(overload, device_type)
    operation = _Operation(take_back=lambda: None, original=original, is_fallback=is_fallback)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return operation(keyset, *args, **kwargs)

    operation.take_back = register_autocast_kernel(overload, kernel, device_type=device_type)
    return operation
