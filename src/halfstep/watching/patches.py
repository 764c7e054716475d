"""Functions of torch that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, Final, final
from weakref import WeakSet

from halfstep._torch import kept_out_of_graphs

__all__ = ["Patches"]

_MISSING: Final = object()

# Python leaves out frames of files with such a name when it looks for the line that a warning is about, as it does with its own import
# system. So a warning of torch names the line of the user's code, and not the function that stands between the two.
_UNSEEN: Final = str(Path(__file__).with_name("importlib._bootstrap.py"))


@final
class Patches:
    """Replaces methods and functions, and puts them back.

    Example:
        >>> class Loop:
        ...     def run(self):
        ...         return "ran"
        >>> patches = Patches()
        >>> patches.wrap(Loop, "run", lambda run: lambda self: f"watched, it {run(self)}")
        >>> Loop().run()
        'watched, it ran'
        >>> patches.undo()
        >>> Loop().run()
        'ran'
    """

    def __init__(self) -> None:
        for each in _together:  # Two that put things back for a while would take each other's functions for torch's.
            each.resume()
        _together.add(self)
        self._kept: list[tuple[Any, str, Any, Any]] = []
        self._pausing: list[tuple[Any, str, Any, Any]] = []

    def wrap(
        self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], *, pauses: bool = False, in_graphs: bool = False
    ) -> None:
        """Replaces a function in a class or a module.

        Args:
            owner: The class or module. A class that inherits the function gets one of its own until `undo`.
            name: The function's name.
            make: Returns what is put in its place, given the function.
            pauses: Whether `pause` puts it back for a while.
            in_graphs: Whether `torch.compile` may look into it.
        """
        original = getattr(owner, name)
        before = vars(owner).get(name, _MISSING)
        if not isinstance(original, FunctionType) or (before is not _MISSING and not isinstance(before, FunctionType)):
            return  # Such as a static method of a subclass: it is left alone.
        replacement: Any = make(original)
        update_wrapper(replacement, original)
        replacement.__code__ = replacement.__code__.replace(co_filename=_UNSEEN)
        if not in_graphs:
            replacement = kept_out_of_graphs(replacement)
        self._kept.append((owner, name, before, replacement))
        setattr(owner, name, replacement)
        if pauses and before is not _MISSING:
            self._pausing.append((owner, name, before, replacement))

    def pause(self) -> None:
        """Puts back for a while what was said to pause, unless somebody else has replaced it since."""
        if len(_together) > 1:
            return
        for owner, name, original, replacement in self._pausing:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

    def resume(self) -> None:
        """Ends a pause."""
        for owner, name, original, replacement in self._pausing:
            if vars(owner).get(name) is original:
                setattr(owner, name, replacement)

    def undo(self) -> None:
        """Puts everything back, the last first; what somebody else has put there since stays."""
        self.resume()
        self._pausing.clear()
        _together.discard(self)
        while self._kept:
            owner, name, before, replacement = self._kept.pop()
            if vars(owner).get(name) is not replacement:
                _ENDED[id(replacement)] = replacement, before
                continue
            # What it stood in for may have ended before it.
            while id(before) in _ENDED:
                before = _ENDED.pop(id(before))[1]
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


# Those that stand in for something now.
_together: Final[WeakSet[Patches]] = WeakSet()

# Functions that stood in for others, and have ended while something else stood in for them: each with what it stood in for.
_ENDED: Final[dict[int, tuple[Any, Any]]] = {}
