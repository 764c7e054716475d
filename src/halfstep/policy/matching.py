"""Which override decides about each module of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from halfstep._torch import own_modules, wrapped_module
from halfstep.errors import ConfigurationError, did_you_mean
from halfstep.policy.overrides import Override, class_names

__all__ = ["Decision", "Place", "bare_model", "check_all_match", "decide", "module_paths", "places", "unmatched_hint"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A module and where it is in a model; a module that is shared has several places.

    Attributes:
        path: Such as `decoder.3.attn`, without what wrappers add to it; empty for the model itself.
        module: The module.
    """

    path: str
    module: nn.Module


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy's overrides say of one place.

    Attributes:
        place: The place.
        override: The index of the override that decides, the last one that is about the module or about one that it is in; `None` where
            there is none.
        direct: Whether that override is about the module itself.
    """

    place: Place
    override: int | None
    direct: bool


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, `torch.compile` and other wrappers of torch's."""
    found = wrapped_module(model)
    return model if found is None else bare_model(found[1])


def module_paths(model: nn.Module) -> frozenset[str]:
    """The paths of all modules of a model, as overrides name them.

    Example:
        >>> sorted(module_paths(nn.Sequential(nn.Linear(1, 1))))
        ['', '0']
    """
    return frozenset(place.path for place in places(model))


def places(model: nn.Module) -> list[Place]:
    """All places of a model, each before those inside of it. Wrappers, such as those for activation checkpointing, are passed through.

    Example:
        >>> [place.path for place in places(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))]
        ['', '0', '1', '1.0']
    """
    return list(_walk(model, path="", within=()))


def _walk(module: nn.Module, *, path: str, within: tuple[int, ...]) -> Iterator[Place]:
    module = bare_model(module)
    if id(module) in within:  # A module that holds itself, by way of its children.
        return
    yield Place(path=path, module=module)
    for name, child in own_modules(module).items():
        if child is not None:
            yield from _walk(child, path=f"{path}.{name}" if path else name, within=(*within, id(module)))


def decide(overrides: Sequence[Override], where: Sequence[Place]) -> list[Decision]:
    """For each place the override that decides about it.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
        >>> [each.override for each in decide([Override.of("0", "fp32")], places(model))]
        [None, 0, 0, None]
    """
    decided: dict[str, int | None] = {}
    decisions = []
    for place in where:
        own = [
            index
            for index, each in enumerate(overrides)
            if each.kind != "op" and each.matches(path=place.path, module_class=type(place.module))
        ]
        inherited = decided[place.path.rpartition(".")[0]] if place.path else None
        last = max((index for index in (*own[-1:], inherited) if index is not None), default=None)
        decided[place.path] = last
        decisions.append(Decision(place=place, override=last, direct=bool(own) and own[-1] == last))
    return decisions


def check_all_match(overrides: Sequence[Override], where: Sequence[Place]) -> None:
    """Accepts overrides that are about something: modules that are there, and classes that exist.

    Raises:
        ConfigurationError: One is about a module that is not there, or a class that nobody knows.
    """
    for each in overrides:
        if each.kind == "op" or any(each.matches(path=place.path, module_class=type(place.module)) for place in where):
            continue
        if each.kind == "class" and _is_known_class(each.pattern):
            continue
        what = f"The override {str(each)!r} matches no module of this {type(where[0].module).__name__}."
        raise ConfigurationError(what + unmatched_hint(each, where))


def unmatched_hint(override: Override, where: Sequence[Place]) -> str:
    """The names nearest to a pattern that matches nothing, as a sentence with a leading blank; where none is near, some that there are."""
    paths = [place.path for place in where if place.path]
    classes = list(dict.fromkeys(name for place in where for name in class_names(type(place.module))[:1]))
    if override.kind == "class":
        names = [name for place in where for name in class_names(type(place.module))]
        near = did_you_mean(override.pattern, known={*names, *_nn_classes()})
        return near or f" Its classes are {_some(classes)}."
    same = [name for name in classes if override.pattern in (name, name.rpartition(".")[2])]
    if same:
        return f" Did you mean the class 'class:{same[0]}'?"
    return did_you_mean(override.pattern, known=paths) or f" Its modules are {_some(paths)}."


def _some(names: Sequence[str], *, most: int = 8) -> str:
    if not names:
        return "none"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_known_class(pattern: str) -> bool:
    """Whether torch has such a class: a policy may be meant for many models, and not each has, say, a norm of each kind."""
    return pattern in _nn_classes()


def _nn_classes() -> set[str]:
    return {name for kind in _subclasses(nn.Module) if kind.__module__.startswith("torch.nn.") for name in class_names(kind)}


def _subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
