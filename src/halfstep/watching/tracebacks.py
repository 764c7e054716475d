"""Tracebacks without the frames that halfstep adds to them."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

__all__ = ["strip_frames"]

_PACKAGE = Path(__file__).parent.parent

# What launches a script, and what stands between the script and the functions of torch that it calls.
_BETWEEN = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("watching", "cli"))

# What that calls in its turn. A script may call it by itself, too, and then these frames belong to the script's traceback.
_BEHIND = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("monitor", "journal"))

# Python 3.10 has none.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


def strip_frames(error: BaseException, *, below: CodeType | None = None) -> None:
    """Takes the frames of halfstep out of the traceback of an error, and of all errors that it hangs together with, in place.

    Those are its cause, its context and the members of a group. Frames of `halfstep.watching` and `halfstep.cli` go wherever they stand,
    and with them what they called of `halfstep.monitor` and `halfstep.journal`.

    Args:
        error: What was raised.
        below: A function's code. Its frame goes, together with all frames above it: what led to the launch of a script.

    Example:
        >>> def launch():
        ...     raise ValueError("of the script")
        >>> try:
        ...     launch()
        ... except ValueError as error:
        ...     strip_frames(error, below=launch.__code__)
        ...     print(error.__traceback__)
        None
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _stripped(each.__traceback__, below)
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, _GROUP):
            waiting += each.exceptions


def _stripped(trace: TracebackType | None, below: CodeType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    launched = next((place + 1 for place, entry in enumerate(entries) if entry.tb_frame.f_code is below), 0)
    kept, hidden = [], False
    for entry in entries[launched:]:
        file = entry.tb_frame.f_code.co_filename
        hidden = file.startswith(_BETWEEN) or (hidden and file.startswith(_BEHIND))
        if not hidden:
            kept.append(entry)
    for entry, following in zip(kept, [*kept[1:], None], strict=False):
        # Each assignment walks to the end in search of a loop: a RecursionError has thousands of entries.
        if entry.tb_next is not following:
            entry.tb_next = following
    return kept[0] if kept else None
