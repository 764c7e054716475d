"""The line of the user's code that something happens in."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch

from halfstep.numerics.sites import is_foreign, relative_file
from halfstep.records import UNKNOWN, Site

__all__ = ["NOWHERE", "Line", "line_above", "site_of"]


class Line(NamedTuple):
    """A line of code.

    Attributes:
        file: As Python knows it.
        number: From 1; 0 where there is none.
        is_direct: Whether that line calls torch itself, and not by way of another library.
    """

    file: str
    number: int
    is_direct: bool


NOWHERE: Final = Line(UNKNOWN, 0, is_direct=False)

_OWN, _LIBRARY, _BETWEEN = range(3)

# Torch, halfstep and Python itself stand between a user or a library and what they call.
_BETWEEN_FOLDERS: Final = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

# A code object is asked for at each call of what is followed, so its answer is kept. Its hash takes long; its identity does not, and since
# the code is kept as well, no other one comes to have it.
_kinds: Final[dict[int, tuple[CodeType, int]]] = {}


def line_above(frame: FrameType | None) -> Line:
    """The innermost line of the user's code at or above a frame; where there is none, that of the library that is nearest to it."""
    is_direct, library = True, NOWHERE
    while frame is not None:
        known = _kinds.get(id(frame.f_code))
        kind = _kind_of(frame.f_code) if known is None else known[1]
        if kind == _OWN:
            return Line(frame.f_code.co_filename, frame.f_lineno, is_direct)
        if kind == _LIBRARY:
            if library is NOWHERE:
                library = Line(frame.f_code.co_filename, frame.f_lineno, is_direct=False)
            is_direct = False
        frame = frame.f_back
    return library


def _kind_of(code: CodeType) -> int:
    filename = code.co_filename
    if not is_foreign(filename):
        kind = _OWN
    elif filename.startswith("<") or (filename.startswith(_BETWEEN_FOLDERS) and not _is_installed(filename)):
        kind = _BETWEEN
    else:
        kind = _LIBRARY
    _kinds[id(code)] = code, kind
    return kind


def _is_installed(filename: str) -> bool:
    """Whether it lies in a folder of installed packages below Python's own, and is not torch."""
    return not filename.startswith(_BETWEEN_FOLDERS[:2]) and not _INSTALLED.isdisjoint(Path(filename).parts)


def site_of(line: Line, *, module: str = UNKNOWN) -> Site:
    """A line as records know it, with its file relative to the current folder.

    Example:
        >>> str(site_of(Line("train.py", 12, is_direct=True), module="head"))
        'head (train.py:12)'
    """
    try:
        folder = Path.cwd()
    except OSError:  # It was deleted.
        folder = Path("/")
    return Site(module=module, file=relative_file(line.file, folder=folder), line=line.number)
