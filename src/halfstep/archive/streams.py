"""A file that goes to the disk while it is written."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from io import BufferedIOBase, BufferedWriter
from typing import Any, Final, final

__all__ = ["EagerStream"]

# So many bytes are worth a call. With less than a few MiB the calls cost more than they save.
_STRIDE: Final = 32 * 1024**2

# SYNC_FILE_RANGE_WRITE: begin to write what is not being written yet, and wait for nothing.
_BEGIN: Final = 2


@final
class EagerStream(BufferedIOBase):
    """A stream into a file, of which the system begins to write each part to the disk as soon as it is there.

    By itself it begins when somebody asks for the file to be flushed, or after some seconds: then the disk waits while the file is written,
    and who wrote it waits for the disk. On systems that cannot be asked to begin, it is the file.

    Args:
        file: A file that is open for writing, at its beginning.

    Example:
        >>> from tempfile import TemporaryFile
        >>> with TemporaryFile() as file:
        ...     stream = EagerStream(file)
        ...     written = stream.write(b"0123456789")
        ...     stream.flush()
        ...     _ = file.seek(0)
        ...     written, file.read()
        (10, b'0123456789')
    """

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._position = 0
        self._begun = 0

    def write(self, data: Any) -> int:
        """Writes bytes, and returns how many those are."""
        written = self._file.write(data)
        self._position += written
        if self._position - self._begun >= _STRIDE and _begin_to_write is not None:
            # Whether it does is of no matter: whoever needs the file on disk flushes it.
            _begin_to_write(self._file.fileno(), self._begun, self._position - self._begun, _BEGIN)
            self._begun = self._position
        return written

    def flush(self) -> None:
        """Hands everything to the system."""
        self._file.flush()


def _found() -> Callable[[int, int, int, int], int] | None:
    """The function of Linux by which the system begins to write a part of a file; `None` elsewhere."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        function.restype = ctypes.c_int
    return function


_begin_to_write: Final = _found()
