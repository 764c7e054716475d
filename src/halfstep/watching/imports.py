"""Doing something as soon as a script has imported a module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from typing_extensions import override

__all__ = ["FirstImport"]


@final
class FirstImport(MetaPathFinder):
    """Calls a function once, right after a module was imported for the first time: at once, if it was before.

    The module is found and made as it is without this, at the line of the script that imports it, and shows no trace of it afterwards.
    A process that was forked in the meantime calls nothing.

    Args:
        name: Of the module, which lies in no package.
        called: What to call.

    Example:
        >>> FirstImport("math", called=lambda: print("math is here")).expect()
        math is here
    """

    def __init__(self, name: str, *, called: Callable[[], object]) -> None:
        self._name = name
        self._called = called
        self._owner = os.getpid()

    def expect(self) -> None:
        """Begins to wait for the import."""
        if self._name in sys.modules:
            self._called()
        else:
            sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Waits no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find."""
        if fullname != self._name:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in [*sys.meta_path] if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        self.forget()
        if os.getpid() == self._owner:
            self._called()


@final
class _Loader(Loader):
    """Another loader, in all respects, that says when it is through."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done()
