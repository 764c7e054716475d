"""Functions whose arguments are cast, as O1 does with those of torch that gain by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from halfstep._torch import tree_leaves
from halfstep.amp.session import current
from halfstep.casting import cast_arguments
from halfstep.errors import ConfigurationError

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "install_registered",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# From the half precision of the session and the tensors among the arguments to what they are cast to; `None` for as they are.
_Choice: TypeAlias = Callable[[torch.dtype, set[torch.dtype]], torch.dtype | None]

_casts_disabled: Final = ContextVar("_casts_disabled", default=False)
_registered: Final[list[tuple[Any, str, _Choice]]] = []


def _active_half() -> torch.dtype | None:
    """The half precision that functions are cast to now; `None` where they are not cast."""
    now = current()
    if now is None or now.properties is None or not now.properties.patch_torch_functions or _casts_disabled.get():
        return None
    return now.properties.half


def _half(half: torch.dtype, _: set[torch.dtype]) -> torch.dtype | None:
    return half


def _float(_: torch.dtype, __: set[torch.dtype]) -> torch.dtype | None:
    return torch.float32


def _widest(_: torch.dtype, dtypes: set[torch.dtype]) -> torch.dtype | None:
    return torch.float32 if len(dtypes) > 1 else None


def _casting(function: _F, choose: _Choice) -> _F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        half = _active_half()
        if half is None:
            return function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        dtype = choose(half, {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()})
        if dtype is None:
            return function(*args, **kwargs)
        cast_args, cast_kwargs, _ = cast_arguments(args, kwargs, dtype)
        return function(*cast_args, **cast_kwargs)

    return call  # type: ignore[return-value]


def half_function(function: _F) -> _F:
    """A function whose tensors are cast to half before it is called, after `amp.initialize` with O1; at other levels nothing changes.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> @amp.half_function
        ... def product(a, b):
        ...     return a @ b
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1")
        >>> product(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float16
    """
    return _casting(function, _half)


def float_function(function: _F) -> _F:
    """A function whose tensors are cast to fp32 before it is called, after `amp.initialize` with O1; at other levels nothing changes.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> @amp.float_function
        ... def norm(a):
        ...     return (a * a).sum()
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1")
        >>> norm(torch.full((4,), 256.0, dtype=torch.float16))
        tensor(262144.)
    """
    return _casting(function, _float)


def promote_function(function: _F) -> _F:
    """A function whose tensors, if they are not of one dtype, are cast to fp32, after `amp.initialize` with O1.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> @amp.promote_function
        ... def dtypes(a, b):
        ...     return a.dtype, b.dtype
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1")
        >>> dtypes(torch.ones(2), torch.ones(2, dtype=torch.float16))
        (torch.float32, torch.float32)
    """
    return _casting(function, _widest)


def register_half_function(module: Any, name: str) -> None:
    """Makes a function of a module a `half_function`, at the next `amp.initialize` with O1, or at once after one.

    Args:
        module: A Python module, or anything that has the function as an attribute.
        name: The function's.

    Raises:
        ConfigurationError: There is no such function.

    Example:
        >>> import types
        >>> from halfstep import amp
        >>> kernels = types.SimpleNamespace(product=lambda a, b: a @ b)
        >>> amp.register_half_function(kernels, "product")
    """
    _register(module, name, _half)


def register_float_function(module: Any, name: str) -> None:
    """Makes a function of a module a `float_function`; see `register_half_function`.

    Example:
        >>> import types
        >>> from halfstep import amp
        >>> kernels = types.SimpleNamespace(norm=lambda a: a.norm())
        >>> amp.register_float_function(kernels, "norms")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: There is no function 'norms' in the SimpleNamespace that was passed.
    """
    _register(module, name, _float)


def register_promote_function(module: Any, name: str) -> None:
    """Makes a function of a module a `promote_function`; see `register_half_function`.

    Example:
        >>> import types
        >>> from halfstep import amp
        >>> kernels = types.SimpleNamespace(add=lambda a, b: a + b)
        >>> amp.register_promote_function(kernels, "add")
    """
    _register(module, name, _widest)


def _register(module: Any, name: str, choice: _Choice) -> None:
    if not callable(getattr(module, name, None)):
        what = getattr(module, "__name__", None)
        where = f"in {what}" if what else f"in the {type(module).__name__} that was passed"
        raise ConfigurationError(f"There is no function {name!r} {where}.")
    _registered.append((module, name, choice))
    now = current()
    if now is not None and now.properties is not None and now.properties.patch_torch_functions:
        install_registered()


def install_registered() -> None:
    """Puts functions that cast in the places of those that were registered since the last call."""
    while _registered:
        module, name, choice = _registered.pop(0)
        setattr(module, name, _casting(getattr(module, name), choice))


@contextmanager
def disable_casts() -> Iterator[None]:
    """A block in which O1 casts nothing: autocast is off in it, and functions that are marked to be cast are not.

    A model that `amp.initialize` returned computes as it always does when it is called in the block.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> product = amp.half_function(torch.matmul)
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1")
        >>> with amp.disable_casts():
        ...     product(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float32
    """
    token = _casts_disabled.set(True)
    try:
        with ExitStack() as stack:
            for device_type in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            yield
    finally:
        _casts_disabled.reset(token)
