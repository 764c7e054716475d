"""What halfstep uses of torch's modules and their wrappers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["own_modules", "own_parameters", "set_class", "wrapped_module"]


def own_modules(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """The modules that a module holds, by name, without those inside of them, with those that are `None`.

    Private: `Module._modules`, because the public `named_children` leaves out the second name of a module that is there twice. Seen
    on torch 2.9 to 2.13.
    """
    return module._modules


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """The parameters of a module by name, without those of its submodules, with those that are `None`.

    Private: `Module._parameters`, because a walk over `parameters(recurse=False)` takes ten times as long. Seen on torch 2.9 to 2.13.
    """
    return module._parameters


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
