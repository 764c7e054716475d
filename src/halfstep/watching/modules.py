"""The modules of a process, as far as an optimizer has to do with them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from halfstep._torch import own_buffers, own_modules, own_parameters, wrapped_module

__all__ = ["live_modules", "model_of", "nonfinite_buffers", "orphans", "strays"]


_LOOKED_AT: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def live_modules() -> list[nn.Module]:
    """All modules that are alive. It takes some tens of milliseconds, and is for what is seldom asked."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_parameters" in vars(each)]


def model_of(parameters: Iterable[Tensor]) -> nn.Module | None:
    """The module that holds most of these parameters and fewest others, without what is wrapped around it; `None` where none holds any.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model_of(model.parameters()) is model
        True
    """
    wanted = {id(each) for each in parameters}
    best: list[nn.Module] = []
    most = (0, 0)
    for module in live_modules():
        held = {id(each) for inner in _within(module) for each in own_parameters(inner).values() if each is not None}
        key = (len(held & wanted), -len(held))
        if key[0] and key >= most:
            best = [*best, module] if key == most else [module]
            most = key
    inner = {id(child) for module in best for child in own_modules(module).values()}
    outermost = next((module for module in best if id(module) not in inner), None)
    while outermost is not None and (wrapped := wrapped_module(outermost)) is not None:
        outermost = wrapped[1]
    return outermost


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all in it, without a method that its class may have overridden."""
    waiting, seen = [module], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [child for child in own_modules(each).values() if child is not None]


def strays(parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[Tensor]:
    """Those of an optimizer's parameters that no module has."""
    held = {id(each) for module in modules for each in own_parameters(module).values() if each is not None}
    return [each for each in parameters if id(each) not in held]


def orphans(known: Iterable[int], modules: Iterable[nn.Module]) -> Iterator[str]:
    """The parameters that got a gradient and that no optimizer has, by the class of their module and their name.

    Args:
        known: The parameters of all optimizers, by `id`.
        modules: All modules.
    """
    owned = set(known)
    for module in modules:
        for name, each in own_parameters(module).items():
            if each is not None and each.requires_grad and each.is_leaf and each.grad is not None and id(each) not in owned:
                owned.add(id(each))
                yield f"{type(module).__name__}.{name}"


def nonfinite_buffers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The buffers of a model that training has made non-finite, by the path of their module and their name.

    An infinity may be meant so, as in a mask; it counts among running statistics alone.
    """
    for path, module in dict(model.named_modules()).items():
        is_norm = "running_mean" in own_buffers(module)
        for name, buffer in own_buffers(module).items():
            if type(buffer) is not Tensor or buffer.layout is not torch.strided or buffer.dtype not in _LOOKED_AT or buffer.is_meta:
                continue
            bad: Any = ~torch.isfinite(buffer) if is_norm else torch.isnan(buffer)
            if bool(bad.any()):
                yield path, name
