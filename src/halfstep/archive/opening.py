"""Files that are read without trust in what they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from halfstep.archive.wording import cut_short, unreadable
from halfstep.errors import DamagedCheckpointError

__all__ = ["opened", "read_at", "size_of"]

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """A region in which a file is open for reading, without a buffer. What is no file is refused, and never waited for.

    Raises:
        CheckpointError: It is not there, or cannot be read.
        DamagedCheckpointError: It is a folder, a pipe or a device.
    """
    try:
        file = FileIO(os.fspath(path), "r", opener=_open)
    except IsADirectoryError as error:
        raise _no_file(path, "a folder") from error
    except (OSError, ValueError) as error:  # Python calls a name with a NUL in it a ValueError.
        raise unreadable(path, error) from error
    with file:
        try:
            _refuse_others(path, os.fstat(file.fileno()).st_mode)
            yield file
        except OSError as error:
            raise unreadable(path, error) from error


def _open(name: str, flags: int) -> int:
    # A pipe that nobody writes to would be waited for.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def _refuse_others(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _no_file(path, next((kind for test, kind in _KINDS if test(mode)), "a device"))


def _no_file(path: Path, kind: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} is no checkpoint of halfstep, but {kind}.")


def size_of(file: FileIO) -> int:
    """How many bytes an open file has."""
    return os.fstat(file.fileno()).st_size


def read_at(file: FileIO, path: Path, *, offset: int, length: int) -> bytes:
    """So many bytes of a file.

    Raises:
        DamagedCheckpointError: It ends before them.
    """
    file.seek(offset)
    read = file.read(length) or b""
    while len(read) < length:  # The system gives at most 2 GiB at once.
        more = file.read(length - len(read))
        if not more:
            raise cut_short(path, f"it ends {length - len(read)} bytes before the end of something in it")
        read += more
    return read
