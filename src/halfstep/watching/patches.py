"""Functions of torch that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any, Final, final

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
        self._kept: list[tuple[Any, str, Any]] = []
        self._pausing: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], *, pauses: bool = False) -> None:
        """Replaces a function in a class or a module.

        Args:
            owner: The class or module. A class that inherits the function gets one of its own until `undo`.
            name: The function's name.
            make: Returns what is put in its place, given the function.
            pauses: Whether `pause` puts it back for a while.
        """
        original = getattr(owner, name)
        replacement: Any = make(original)
        update_wrapper(replacement, original)
        replacement.__code__ = replacement.__code__.replace(co_filename=_UNSEEN)
        before = vars(owner).get(name, _MISSING)
        self._kept.append((owner, name, before))
        setattr(owner, name, kept_out_of_graphs(replacement))
        if pauses and before is not _MISSING:
            self._pausing.append((owner, name, before, replacement))

    def pause(self) -> None:
        """Puts back for a while what was said to pause, unless somebody else has replaced it since."""
        for owner, name, original, replacement in self._pausing:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

    def resume(self) -> None:
        """Ends a pause."""
        for owner, name, original, replacement in self._pausing:
            if vars(owner).get(name) is original:
                setattr(owner, name, replacement)

    def undo(self) -> None:
        """Puts everything back, the last first."""
        self._pausing.clear()
        while self._kept:
            owner, name, original = self._kept.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
