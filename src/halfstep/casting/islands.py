"""Modules whose forward runs in a region of its own.

A module is given a class of its own, derived from the one it has, whose `forward` enters the region. So everything that finds a method by
the class finds this one: `torch.compile` guards on the class, `DataParallel` copies it, hooks run around it. The module's dictionary, and
with it parameters, hooks and the state dict, is not touched. The class says that it is the one that it is derived from: copies and pickles
of the module are of that one, slices of a container as well, and when something else changes the class of the module, as `fully_shard` and
parametrizations do, the region stays.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, final

import torch
from torch import nn

from halfstep._torch import is_being_traced, set_class
from halfstep.casting.regions import Region
from halfstep.casting.weights import weight_methods
from halfstep.errors import ConfigurationError

__all__ = ["Island", "Islands", "check_no_island"]

# Classes that were made here have it.
_MARK: Final = "__halfstep_island__"


@final
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Island:
    """What is to become of a module.

    Attributes:
        module: The module.
        region: The region that its forward runs in; `None` for its caller's.
        shows_weights: Whether it shows its weights in the dtype of the pure region that asks for them.
        calls_inner: Whether it calls the modules inside of it even where torch would take their weights and compute without them, as
            `nn.TransformerEncoderLayer` does in an evaluation without gradients.
        with_hooks: Whether its hooks run in the region, too, some of which compute its weights.
        seen_again: The dtype that it shows its weights in to code of a pure policy that runs again after its region has ended.
    """

    module: nn.Module
    region: Region | None
    shows_weights: bool = False
    calls_inner: bool = False
    with_hooks: bool = True
    seen_again: torch.dtype | None = None


@final
class Islands:
    """Modules that run in regions of their own until they are removed.

    Args:
        islands: The modules, each with its region.
        device_type: Of the model; for modules that are called without a tensor.

    Raises:
        ConfigurationError: One of them has a region already, or was compiled by TorchScript. Nothing was changed.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> islands = Islands([Island(module=layer, region=Region(precision="fp32"))], device_type="cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     layer(torch.ones(1, 2)).dtype
        torch.float32
        >>> islands.remove()
        >>> type(layer)
        <class 'torch.nn.modules.linear.Linear'>
    """

    def __init__(self, islands: Iterable[Island], *, device_type: str) -> None:
        islands = list(islands)
        for island in islands:
            _check(island.module)
        self._classes: dict[tuple[type, _Kind], type] = {}
        self._device_type = device_type
        self._modules: list[nn.Module] = []
        try:
            for island in islands:
                set_class(island.module, self._class_for(island))
                self._modules.append(island.module)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Gives the modules back the class that they had, or were given by others since. The second call does nothing."""
        while self._modules:
            module = self._modules.pop()
            if _is_island(module):
                set_class(module, module.__class__)

    def _class_for(self, island: Island) -> type:
        module = island.module
        kind = _Kind(
            region=island.region,
            device_type=self._device_type,
            has_own_forward="forward" in vars(module),
            shows_weights=island.shows_weights,
            calls_inner=island.calls_inner,
            with_hooks=island.with_hooks,
            seen_again=island.seen_again,
        )
        key = (type(module), kind)
        if key not in self._classes:
            self._classes[key] = _island_class(type(module), kind)
        return self._classes[key]


def _is_island(module: nn.Module) -> bool:
    return getattr(type(module), _MARK, False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What tells apart the classes that are derived from one class."""

    region: Region | None
    device_type: str
    has_own_forward: bool
    shows_weights: bool
    calls_inner: bool
    with_hooks: bool
    seen_again: torch.dtype | None


def check_no_island(module: nn.Module) -> None:
    """Accepts a module that no policy has made an island of.

    Raises:
        ConfigurationError: One has.
    """
    if _is_island(module):
        raise ConfigurationError(
            f"A policy is applied to this {type(module).__name__} already. Call remove() on its handle first (the policy_handle of a "
            "MixedPrecision), or join the two policies into one."
        )


def _check(module: nn.Module) -> None:
    check_no_island(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"A module that TorchScript compiled ({getattr(module, 'original_name', type(module).__name__)}) cannot have a precision of "
            "its own. Apply the policy to the Python model, or override the module that calls it."
        )


def _island_class(kind: Any, of: _Kind) -> type:
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, _MARK: True}
    if of.region is not None:
        names["forward"] = _forward(kind, of.region, of)
        if of.with_hooks:
            names["__call__"] = _call(kind, of.region, of)
    if of.shows_weights:
        names.update(weight_methods(kind, again=of.seen_again))
    if of.calls_inner:
        names.update(_INNER_CALLS)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        return (_plain(function), tuple(_plain(argument) for argument in arguments), *rest)

    def _plain(value: Any) -> Any:
        return kind if value is island else value

    names["__reduce_ex__"] = reduce

    def follow(self: nn.Module, other: type) -> None:
        set_class(self, _island_class(other, of))

    # The tracer of torch.compile looks methods up by the class that an object says it has, and writes guards for the one that it has.
    names["__class__"] = property(lambda self: type(self) if is_being_traced() else kind, follow)
    island = _derived(kind, names)
    return island


def _derived(kind: Any, names: dict[str, Any]) -> type:
    """A class derived from another one, if possible without its knowledge: `__init_subclass__` may keep a register of models."""
    registers = any("__init_subclass__" in vars(base) for base in kind.__mro__ if base not in (object, Generic))
    if registers:
        unknown = types.new_class(kind.__name__, (nn.Module,), {}, lambda namespace: namespace.update(names))
        try:
            unknown.__bases__ = (kind,)
        except TypeError:  # The class has slots, or a base that is no module before the one that is.
            pass
        else:
            return unknown
    return types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(names))


# In an evaluation, torch's fast path asks a `TransformerEncoderLayer` for its activation as a number, which nothing else looks at: 0 is one
# that the path cannot compute. See torch/nn/modules/transformer.py, torch 2.9 to 2.13.
_INNER_CALLS: Final = {
    "activation_relu_or_gelu": property(
        lambda self: 0,
        lambda self, value: vars(self).__setitem__("activation_relu_or_gelu", value),
    )
}


def _forward(kind: Any, region: Region, of: _Kind) -> Any:
    if of.has_own_forward:
        return _own_forward(region, of.device_type)
    run, device_type = _runner(region), of.device_type
    takes_no_self = isinstance(inspect.getattr_static(kind, "forward"), staticmethod | classmethod)

    def static(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(*args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(static if takes_no_self else kind.forward, self, args, kwargs, device_type)

    return functools.wraps(kind.forward)(_with_own_code(forward))


def _call(kind: Any, region: Region, of: _Kind) -> Any:
    run, device_type = _runner(region), of.device_type

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(kind.__call__, self, args, kwargs, device_type)

    return _with_own_code(call)


def _runner(region: Region) -> Any:
    return types.MethodType(_with_own_code(region.runner().__func__), region)


def _with_own_code(function: Any) -> types.FunctionType:
    """The same function with another code object.

    `torch.compile` keeps what it compiles by the code object, and no more than a few versions for each. Where the code of islands has graph
    breaks in it, each of their classes needs versions of its own.
    """
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _own_forward(region: Region, device_type: str) -> property:
    """A `forward` for modules that have one in their dictionary, which would be found before the class's; a property comes before both."""
    run = region.runner()

    def get(self: nn.Module) -> Any:
        own = vars(self)["forward"]

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(lambda _, *args, **kwargs: own(*args, **kwargs), self, args, kwargs, device_type)

        return forward

    def put(self: nn.Module, function: Any) -> None:
        vars(self)["forward"] = function

    def delete(self: nn.Module) -> None:
        del vars(self)["forward"]

    return property(get, put, delete)
