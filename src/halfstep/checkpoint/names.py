"""What a model calls its parameters and buffers once its wrappers are taken off."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from halfstep._torch import own_buffers, own_modules, wrapped_module
from halfstep.engine import is_writable

__all__ = ["canonical_names", "empty_buffers", "frozen_names", "transient_buffers"]

# Larger ones are tables that the model makes again, such as masks and positions.
_LARGEST: Final = 65536


def canonical_names(model: nn.Module, names: list[str]) -> dict[str, str]:
    """For each name in a state of a model the one that it has without `DistributedDataParallel`, `torch.compile` and the like.

    So what one run saved in a wrapper another loads without it.

    Args:
        model: The model, with its wrappers.
        names: Keys of its `state_dict()`, or names of its parameters.

    Example:
        >>> model = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
        >>> canonical_names(model, list(model.state_dict()))
        {'0.module.weight': '0.weight', '0.module.bias': '0.bias'}
    """
    prefixes: dict[str, str] = {}
    _walk(model, "", "", prefixes, within=())
    return {name: _canonical(name, prefixes) for name in names}


def _walk(module: nn.Module, actual: str, canonical: str, prefixes: dict[str, str], *, within: tuple[int, ...]) -> None:
    if id(module) in within:  # A module that holds itself, by way of its children.
        return
    prefixes[actual] = canonical
    wrapped = wrapped_module(module)
    inner = None if wrapped is None else wrapped[0]
    for name, child in own_modules(module).items():
        if child is not None:
            below = canonical if name == inner else f"{canonical}{name}."
            _walk(child, f"{actual}{name}.", below, prefixes, within=(*within, id(module)))
            if name == inner and name.startswith("_"):  # checkpoint_wrapper leaves itself out of the names.
                _walk(child, actual, below, prefixes, within=(*within, id(module)))


def _canonical(name: str, prefixes: dict[str, str]) -> str:
    prefix = name
    while prefix:
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
        if prefix in prefixes:
            return prefixes[prefix] + name[len(prefix) :]
    return name


def frozen_names(model: nn.Module) -> list[str]:
    """The canonical names of the parameters that are not trained (`requires_grad=False`)."""
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return list(canonical_names(model, names).values())


def empty_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The places for buffers in which there is none yet, such as one that the first forward pass makes, by canonical names."""
    places = {
        f"{path}.{name}".lstrip("."): (module, name)
        for path, module in model.named_modules()
        for name, buffer in own_buffers(module).items()
        if buffer is None
    }
    names = canonical_names(model, list(places))
    return {names[name]: place for name, place in places.items()}


def transient_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are no part of a model's state (`persistent=False`) and that training may write to, by the model's own names.

    Left out are those with more than 65536 elements, and those that nobody can write to.
    """
    state = model.state_dict()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name not in state and type(buffer) is Tensor and buffer.numel() <= _LARGEST and is_writable(buffer)
    }
