"""What halfstep uses of torch's modules and their wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["gathered_dtypes", "own_modules", "set_class", "wrapped_module"]


def gathered_dtypes(model: torch.nn.Module) -> frozenset[torch.dtype]:
    """The dtypes that `fully_shard` gathers parameters in, where a policy of its own says so.

    Private: `FSDPModule._get_fsdp_state`, and of that state `_mp_policy`. Seen on torch 2.9 to 2.13; without them there are none.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    states = [module._get_fsdp_state() for module in modules]
    dtypes = (getattr(getattr(state, "_mp_policy", None), "param_dtype", None) for state in states)
    return frozenset(dtype for dtype in dtypes if dtype is not None)


def own_modules(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """The modules that a module holds, by name, without those inside of them, with those that are `None`.

    Private: `Module._modules`, because the public `named_children` leaves out the second name of a module that is there twice. Seen
    on torch 2.9 to 2.13.
    """
    return module._modules


def set_class(module: torch.nn.Module, kind: type) -> None:
    """Changes the class of a module, also where the class has a property of the name `__class__`."""
    object.__dict__["__class__"].__set__(module, kind)


def wrapped_module(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """What a wrapper of torch's wraps, with the name under which it holds it; `None` for a module that is no wrapper.

    Private: the attributes `_orig_mod` of what `torch.compile` returns, `_checkpoint_wrapped_module` of `checkpoint_wrapper`, and
    `_fsdp_wrapped_module` of `FullyShardedDataParallel`. Seen on torch 2.9 to 2.13.
    """
    names = ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        names = ["module"]
    children = dict(module.named_children())
    return next(((name, children[name]) for name in names if name in children), None)
