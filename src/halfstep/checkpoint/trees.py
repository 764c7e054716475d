"""Nested states of plain values and tensors: what a checkpoint may hold, and the names of the places in it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from halfstep._torch import set_versions, storage_key, versions_in
from halfstep.distributed import dtensor_type, local_tensor
from halfstep.errors import CheckpointError

__all__ = ["Place", "at", "compacted", "copied", "named", "plain", "put_at", "replaced", "tensors_in"]

# The keys and positions that lead to a value in a nested state.
Place = tuple[Any, ...]

# Exactly these: a subclass could have code of its own, which a file must not call for.
_SIMPLE: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_KEYS: Final = (type(None), bool, int, float, str)
_TENSORS: Final = (Tensor, nn.Parameter, nn.Buffer)
_DEEPEST: Final = 64

# A pickle has another form for whole numbers of more than 255 bytes, the sign included.
_MOST_BITS: Final = 2039

_ALLOWED: Final = "tensors, numbers, text, bytes, None, and lists, tuples and dictionaries of those"


def named(place: Place) -> str:
    """A place in words, its keys with dots between them.

    Example:
        >>> named(("optimizer", "state", 0, "exp_avg"))
        'optimizer.state.0.exp_avg'
    """
    return ".".join(map(str, place))


def plain(value: Any, place: Place, *, take: Callable[[Place, Tensor], bool] = lambda *_: False) -> Any:
    """A nested state as a checkpoint holds it: containers are copied, tensors are detached and share their memory.

    Numbers of NumPy's become Python's.

    Args:
        value: The state.
        place: Where it stands.
        take: Says of each tensor whether it is saved elsewhere, so that `None` stands in its place.

    Raises:
        CheckpointError: Something in it cannot be written to a file that is read without running code.

    Example:
        >>> plain({"best": np.float64(0.5), "rates": (0.1, 0.2)}, ("extra",))
        {'best': 0.5, 'rates': (0.1, 0.2)}
        >>> plain({"when": OrderedDict, "rates": (0.1, 0.2)}, ("extra",))
        Traceback (most recent call last):
        ...
        halfstep.errors.CheckpointError: extra.when is a type, which a checkpoint cannot hold: reading it would mean running code. ...
    """
    if type(value) in _SIMPLE:
        return _readable(value, place)
    if isinstance(value, Tensor):
        return None if take(place, value) else _plain_tensor(value, place)
    # Not a number of extended precision, which stays NumPy's.
    if isinstance(value, np.generic) and not isinstance(value, np.void) and type(value.item()) in _SIMPLE:
        return plain(value.item(), place)
    if len(place) > _DEEPEST:
        raise CheckpointError(f"{named(place[:8])}... is nested more than {_DEEPEST} levels deep, or holds itself. A checkpoint cannot.")
    kind = type(value)
    if kind is set:
        return {_key(each, place) for each in value}
    if kind in (list, tuple):
        return kind(plain(each, (*place, number), take=take) for number, each in enumerate(value))
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):  # Also a default dictionary, or a read-only view.
        copied: Any = kind() if kind in (OrderedDict, Counter) else {}
        for key, each in value.items():
            copied[_key(key, place)] = plain(each, (*place, key), take=take)
        if (versions := versions_in(value)) is not None:
            set_versions(copied, plain(versions, (*place, "(versions)")))
        return copied
    raise CheckpointError(
        f"{named(place)} is a {kind.__name__}, which a checkpoint cannot hold: reading it would mean running code. Allowed are "
        f"{_ALLOWED}.{_hint(value)}"
    )


def _readable(value: Any, place: Place) -> Any:
    """A simple value, unless torch writes it in a form that it then takes for a call of code.

    Raises:
        CheckpointError: It is one of those.
    """
    if type(value) is bytes and not value:
        raise CheckpointError(f"{named(place)} is empty bytes, which a checkpoint cannot hold: torch could not read them again. Save None.")
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{named(place)} is a whole number of {value.bit_length()} bits, and torch cannot read one of more than {_MOST_BITS} again: "
            "save it as text."
        )
    return value


def _hint(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " Pass torch.from_numpy(...) of it, or its tolist()."
    return " Pass its state_dict()." if callable(getattr(value, "state_dict", None)) and not isinstance(value, type) else ""


def _key(key: Any, place: Place) -> Any:
    if type(key) in _KEYS or (type(key) is tuple and all(type(each) in _KEYS for each in key)):
        return _readable(key, place)
    if isinstance(key, np.generic) and type(key.item()) in _KEYS:
        return key.item()
    raise CheckpointError(f"{named(place)} has the key {key!r}, a {type(key).__name__}. Keys in a checkpoint are text and numbers.")


def _plain_tensor(value: Tensor, place: Place) -> Tensor:
    kind = dtensor_type()
    if kind is not None and isinstance(value, kind) and value.device_mesh.size() == 1:  # Spread over this process alone.
        value = local_tensor(value.detach())
    if type(value) not in _TENSORS:
        raise CheckpointError(
            f"{named(place)} is a {type(value).__name__}, a kind of tensor that a checkpoint cannot hold. Save a plain tensor made of it."
        )
    if value.is_nested:
        raise CheckpointError(f"{named(place)} is a nested tensor, which a checkpoint cannot hold. Save a list of its parts: unbind().")
    if value.is_meta:
        raise CheckpointError(f"{named(place)} is on the meta device and has no values that could be saved.")
    detached = value.detach()
    return detached if type(detached) is Tensor else detached.as_subclass(Tensor)


def tensors_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Every tensor in a nested state with its place, in the order in which a pickle meets them."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*place, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from tensors_in(each, (*place, number))


def compacted(value: Any) -> Any:
    """A nested state in which tensors that show a small part of some memory have memory of their own, since all of it would be saved."""
    shown: dict[int, list[Tensor]] = {}
    for _, tensor in tensors_in(value):
        if tensor.layout is torch.strided and not tensor.is_quantized:
            shown.setdefault(storage_key(tensor), []).append(tensor)
    small = {
        id(tensor)
        for tensors in shown.values()
        for tensor in tensors
        if 2 * sum(each.nbytes for each in tensors) < tensor.untyped_storage().nbytes()
    }
    return replaced(value, lambda tensor: tensor.clone() if id(tensor) in small else tensor)


def copied(value: Any) -> Any:
    """A nested state whose tensors and containers are its own."""
    return replaced(value, Tensor.clone)


def replaced(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A nested state with something else in the place of each tensor; containers are its own."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        same = type(value)()
        for key, each in value.items():  # One by one: a Counter would count them in update().
            same[key] = replaced(each, change)
        if (versions := versions_in(value)) is not None:
            set_versions(same, versions)
        return same
    return type(value)(replaced(each, change) for each in value) if type(value) in (list, tuple) else value


def at(tree: Any, place: Place) -> Any:
    """What stands at a place.

    Raises:
        LookupError: There is no such place.
    """
    for key in place:
        tree = tree[key]
    return tree


def put_at(tree: Any, place: Place, value: Any) -> None:
    """Puts something at a place, in place of what is there; what holds it is a dictionary or a list."""
    at(tree, place[:-1])[place[-1]] = value
