"""Where the state of a loss scaler stands in what some library saved, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.checkpoint.stand_ins import StandIn
from halfstep.scaler import ScalerSettings
from halfstep.scaler.state import ScalerState

__all__ = ["FoundScaler", "Search", "find_scalers", "number"]

_DEEPEST: Final = 10

# What Lightning calls the plugin that has the scaler, or called it once, at the top of its checkpoints.
_LIGHTNING_VERSION: Final = "pytorch-lightning_version"
_LIGHTNING: Final = (
    "MixedPrecision",
    "MixedPrecisionPlugin",
    "NativeMixedPrecisionPlugin",
    "native_amp_scaling_state",
    "amp_scaling_state",
    "FSDPPrecision",
    "FSDPMixedPrecisionPlugin",
    "FullyShardedNativeNativeMixedPrecisionPlugin",
    "FullyShardedNativeMixedPrecisionPlugin",
    "ShardedNativeMixedPrecisionPlugin",
)
_ENGINE: Final = ("precision", "steps", "scaler")

_TORCH: Final = ("scale", "_growth_tracker")
_APEX: Final = {"loss_scale": "scale", "unskipped": "_growth_tracker"}
# What a scaler of torch consists of when it is pickled whole.
_PICKLED: Final = {
    "_init_scale": "scale",
    "_init_growth_tracker": "_growth_tracker",
    "_growth_factor": "growth_factor",
    "_backoff_factor": "backoff_factor",
    "_growth_interval": "growth_interval",
}
_NAMES: Final = {
    "_growth_tracker",
    *(field.name for field in fields(ScalerSettings)),
    *(field.name for field in fields(ScalerState)),
} - {"growth_tracker"}
_WHOLE: Final = ("_growth_tracker", "growth_interval")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScaler:
    """The state of a scaler.

    Attributes:
        key: The keys that lead to it, with dots between them; empty for the whole.
        entries: Its entries by the names that a `torch.amp.GradScaler` and a `LossScaler` give them, as Python's numbers where they can be.
    """

    key: str
    entries: dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found.

    Attributes:
        found: The states, without those that say the same as an earlier one.
        empty: The keys of states without entries, as disabled scalers have them.
        unscaled: In which precision an engine of halfstep was saved that scales no losses; empty for none.
    """

    found: tuple[FoundScaler, ...]
    empty: tuple[str, ...] = ()
    unscaled: str = ""


def find_scalers(tree: Any, *, key: str = "") -> Search:
    """The states of scalers in nested dictionaries: first where the libraries that wrote them look, then everywhere.

    Args:
        tree: What was loaded.
        key: Where to look in it: keys with dots between them. Empty for everywhere.

    Raises:
        LookupError: There is no such key.

    Example:
        >>> saved = {"epoch": 3, "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}}
        >>> find_scalers(saved).found
        (FoundScaler(key='amp.loss_scaler0', entries={'scale': 1024.0, '_growth_tracker': 7}),)
    """
    if key:
        tree = next(_at(tree, key), _MISSING)
        if tree is _MISSING:
            raise LookupError(key)
    states = [(place, entries) for place, node in _known(tree) if (entries := _entries(node))]
    visited = [] if states else list(_nodes(tree))
    states += [(place, entries) for place, node in visited if (entries := _entries(node))]
    found: dict[str, FoundScaler] = {}
    for place, entries in states:
        content = {_APEX.get(name, name): number(value, whole=_APEX.get(name, name) in _WHOLE) for name, value in entries.items()}
        named = {name: value for name, value in content.items() if name in _NAMES}
        found.setdefault(_identity(named), FoundScaler(key=_joined(key, place), entries=named))
    return Search(
        found=tuple(found.values()),
        empty=tuple(_joined(key, place) for place, node in visited if _is_empty(place, node)),
        unscaled=next((str(node["precision"]) for _, node in visited if _is_engine(node) and node["scaler"] is None), ""),
    )


_MISSING: Final = object()


def _identity(entries: Mapping[str, Any]) -> str:
    """Text that is the same for states that say the same. Tensors that are no numbers are not looked at."""
    return ", ".join(f"{name}: {id(value) if isinstance(value, Tensor) else value!r}" for name, value in sorted(entries.items()))


def _joined(*keys: str) -> str:
    return ".".join(filter(None, keys))


def _at(node: Any, key: str) -> Iterator[Any]:
    """What a key leads to. A name may have dots of its own, so that it may lead to several."""
    for name, child in _children(node):
        if name == key:
            yield child
        elif key.startswith(f"{name}."):
            yield from _at(child, key[len(name) + 1 :])


def _known(tree: Any) -> list[tuple[str, Any]]:
    """The places at which the library that wrote this would look, and no other."""
    if not isinstance(tree, Mapping):
        return []
    if _is_engine(tree):
        return [("scaler", tree["scaler"])]
    if _is_engine(tree.get("amp")):
        return [("amp.scaler", tree["amp"]["scaler"])]
    return [(name, tree[name]) for name in _LIGHTNING if name in tree] if _LIGHTNING_VERSION in tree else []


def _is_engine(node: Any) -> bool:
    return isinstance(node, Mapping) and all(name in node for name in _ENGINE)


def _nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Everything that could be a state, from the top down, each object once, and nothing that is in a state."""
    seen = {id(tree): tree}  # Each is kept, so that no other gets its number.
    level = [("", tree)]
    for _ in range(_DEEPEST):
        yield from level
        below = [(_joined(place, name), child) for place, node in level if not _entries(node) for name, child in _children(node)]
        level = [(place, child) for place, child in below if _may_hold(child) and seen.setdefault(id(child), child) is child]
        seen.update((id(child), child) for _, child in level)


def _may_hold(node: Any) -> bool:
    return isinstance(node, Mapping | list | tuple | StandIn | torch.amp.GradScaler)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, StandIn):
        yield from _children(node.state)
        yield from _children(node.arguments)
    elif isinstance(node, Mapping):
        yield from ((str(name), child) for name, child in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(place), child) for place, child in enumerate(node))


def _entries(node: Any) -> Mapping[str, Any] | None:
    """The entries of a state; `None` for what is none, or is that of a disabled scaler."""
    if isinstance(node, torch.amp.GradScaler):
        return node.state_dict() or None
    if isinstance(node, Mapping):
        return node if any(all(name in node for name in names) for names in (_TORCH, _APEX)) else None
    if isinstance(node, StandIn) and isinstance(node.state, Mapping) and all(name in node.state for name in _PICKLED):
        return {name: node.state[theirs] for theirs, name in _PICKLED.items()}
    return None


def _is_empty(place: str, node: Any) -> bool:
    name = place.rpartition(".")[2]
    if isinstance(node, Mapping):
        return not node and (not place or "scal" in name.lower() or name in _LIGHTNING)
    if isinstance(node, torch.amp.GradScaler):
        return not node.state_dict()
    return isinstance(node, StandIn) and node.name.endswith("GradScaler") and not _entries(node)


def number(value: Any, *, whole: bool = False) -> Any:
    """A number as Python has it, if it is one of torch's or of NumPy's; else the value itself.

    Args:
        value: The value.
        whole: Whether a whole number was to be expected, so that 7.0 is 7.

    Example:
        >>> number(torch.tensor([2.0])), number(np.int64(3)), number(7.0, whole=True), number("7")
        (2.0, 3, 7, '7')
    """
    if (
        (type(value) in (Tensor, nn.Parameter) and value.numel() == 1 and not (value.is_meta or value.is_complex()))
        or isinstance(value, np.generic)
        or (type(value) is np.ndarray and value.size == 1)
    ):
        value = value.item()
    elif isinstance(value, StandIn):
        value = _numpy_number(value)
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _numpy_number(value: StandIn) -> Any:
    """The number in a NumPy scalar, of which a file has the type, the byte order and the bytes; else the value itself."""
    match value:
        case StandIn(
            name="numpy._core.multiarray.scalar" | "numpy.core.multiarray.scalar",
            arguments=(StandIn(name="numpy.dtype", arguments=(str(kind), *_), state=(_, str(order), *_)), bytes(raw)),
        ) if kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8") and order in "<>|=":
            return np.frombuffer(raw, dtype=np.dtype(order + kind))[0].item() if len(raw) == int(kind[1]) else value
    return value
