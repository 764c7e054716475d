"""What halfstep uses of torch's modules and their wrappers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["loads_by_itself", "own_modules", "own_parameters", "set_class", "set_versions", "versions_in", "wrapped_module"]


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


def versions_in(state: Any) -> dict[str, dict[str, Any]] | None:
    """The versions of the modules, by path, that `Module.state_dict()` leaves in what it returns; `None` where it left none.

    Private: the attribute `_metadata` of that dictionary, by which a module knows how old a state is that it loads. Seen on torch 2.9 to
    2.13.
    """
    versions = getattr(state, "_metadata", None)
    if not isinstance(versions, Mapping) or not all(isinstance(entry, Mapping) for entry in versions.values()):
        return None
    return {path: dict(entry) for path, entry in versions.items()}


def set_versions(state: Any, versions: Mapping[str, dict[str, Any]]) -> None:
    """Leaves versions in a state as `Module.state_dict()` does.

    Private: the attribute `_metadata`, as in `versions_in`.
    """
    state._metadata = OrderedDict(versions)


def loads_by_itself(module: torch.nn.Module) -> bool:
    """Whether loading a state into a module runs code that is not torch's, which may fail when half is done.

    Private: `Module._load_from_state_dict`, which modules override for that, and the tables of hooks `_load_state_dict_pre_hooks` and
    `_load_state_dict_post_hooks`. Seen on torch 2.9 to 2.13.
    """
    kind = type(module)
    methods: tuple[Any, ...] = (kind._load_from_state_dict, kind.set_extra_state, kind.load_state_dict)
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return bool(hooks) or not all(method.__module__.startswith("torch.") for method in methods)


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
