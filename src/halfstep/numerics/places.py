"""The paths of modules, as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final, final

from torch import Tensor, nn

from halfstep._torch import own_modules, own_parameters, wrapped_module

__all__ = ["Place", "Places"]


@final
class Place:
    """A module, by the path through which it was called from an outermost one.

    Attributes:
        number: What it is known by.
        root: The outermost module, without wrappers.
        path: The path from there; empty for itself.
    """

    __slots__ = ("number", "path", "root")

    def __init__(self, root: nn.Module, path: str, *, number: int) -> None:
        self.number = number
        self.root = root
        self.path = path


# A module that was called, and where it was.
_Called = tuple[nn.Module, Place]


@final
class Places:
    """Finds the paths of modules.

    Args:
        model: The model whose paths they are; without one, the outermost modules that are called.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else _unwrapped(model)
        self._roots: list[nn.Module] = [] if self._model is None else [self._model]
        self._trees: dict[int, _Tree] = {}
        self._numbers = count()
        self._places: list[Place] = []
        self._found: dict[tuple[int, int], tuple[Place, _Called | None, nn.Module]] = {}
        self._owned: dict[int, tuple[int, Tensor]] = {}

    def locate(self, module: nn.Module, *, within: _Called | None) -> Place:
        """Where a module is that is called from within another one, or from outside of any."""
        key = (id(module), within[1].number if within else -1)
        found = self._found.get(key)
        if found is None:
            # The module that the key names by its address is kept alive beside it.
            found = self._found[key] = (self._locate(module, within), within, module)
        return found[0]

    def number_of_owner(self, parameter: Tensor) -> int:
        """The number of the module that a parameter belongs to, which is looked for at the end."""
        owned = self._owned.get(id(parameter))
        if owned is None:
            owned = self._owned[id(parameter)] = (next(self._numbers), parameter)
        return owned[0]

    def _locate(self, module: nn.Module, within: _Called | None) -> Place:
        # A module that is shared has the path through which it was called, unless that comes from outside of the model.
        if within is not None and (self._model is None or within[1].root is self._model):
            inside = self._inside(within, module)
            if inside is not None:
                return inside
        for root in self._roots:
            path = self._tree(root).path(module)
            if path is not None:
                return self._place(root, path)
        inside = None if within is None else self._inside(within, module)
        if inside is not None:
            return inside
        root = _unwrapped(module)
        self._roots.append(root)
        return self._place(root, "")

    def _place(self, root: nn.Module, path: str) -> Place:
        place = Place(root, path, number=next(self._numbers))
        self._places.append(place)
        return place

    def _inside(self, called: _Called, module: nn.Module) -> Place | None:
        path = self._tree(called[0]).path(module)
        return None if path is None else self._place(called[1].root, _joined(called[1].path, path))

    def _tree(self, module: nn.Module) -> _Tree:
        tree = self._trees.get(id(module))
        if tree is None:
            tree = self._trees[id(module)] = _Tree(module)
        return tree

    def names(self, numbers: Iterable[int]) -> dict[int, str]:
        """The path of each of some places, by number: with the class of its outermost module where there are several of those.

        With a model, only what lies outside of it has such a prefix. A number that stands for no module is left out.
        """
        places = {place.number: place for place in self._places}
        for number, parameter in self._owned.values():
            for root in self._roots:
                path = self._tree(root).path_of_owner(parameter)
                if path is not None:
                    places[number] = Place(root, path, number=number)
                    break
        wanted = [places[number] for number in dict.fromkeys(numbers) if number in places]
        roots = list({id(place.root): place.root for place in wanted}.values())
        prefixes = self._prefixes(self._rebased(roots))
        return {place.number: self._name(place, prefixes) for place in wanted}

    def _rebased(self, roots: list[nn.Module]) -> list[nn.Module]:
        """The outermost of some modules: one that was called by itself may also be a part of another."""
        return [root for root in roots if root is self._model or not any(self._contains(other, root) for other in roots)]

    def _contains(self, outer: nn.Module, inner: nn.Module) -> bool:
        return outer is not inner and self._tree(outer).path(inner) is not None

    def _prefixes(self, roots: list[nn.Module]) -> list[tuple[nn.Module, str]]:
        """The outermost modules that are there, each with what stands before its paths."""
        alone = self._model is None and len(roots) == 1
        seen: Counter[str] = Counter()
        prefixes = []
        for root in sorted(roots, key=lambda root: next(place for place, each in enumerate(self._roots) if each is root)):
            name = "" if alone or root is self._model else type(root).__name__
            seen[name] += 1
            prefixes.append((root, name if seen[name] == 1 else f"{name}#{seen[name]}"))
        return prefixes

    def _name(self, place: Place, prefixes: list[tuple[nn.Module, str]]) -> str:
        inner = ((prefix, self._tree(root).path(place.root)) for root, prefix in prefixes)
        prefix, path = next((prefix, path) for prefix, path in inner if path is not None)
        return _joined(_joined(prefix, path), place.path)


@final
class _Tree:
    """The modules within a module, by the first path that leads to each, without the names that wrappers add."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: Final = {id(each): (path, each) for path, each in _walk(module, "", set())}
        self._owners: dict[int, str] = {}

    def path(self, module: nn.Module) -> str | None:
        found = self._modules.get(id(module))
        return None if found is None else found[0]

    def path_of_owner(self, parameter: Tensor) -> str | None:
        if not self._owners:
            for path, module in self._modules.values():
                for own in own_parameters(module).values():
                    self._owners.setdefault(id(own), path)
        return self._owners.get(id(parameter))


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    wrapped = wrapped_module(module)
    for name, child in own_modules(module).items():
        if child is not None:
            yield from _walk(child, path if wrapped is not None and child is wrapped[1] else _joined(path, name), seen)


def _unwrapped(module: nn.Module) -> nn.Module:
    wrapped = wrapped_module(module)
    return module if wrapped is None else _unwrapped(wrapped[1])


def _joined(first: str, second: str) -> str:
    return f"{first}.{second}" if first and second else first or second
