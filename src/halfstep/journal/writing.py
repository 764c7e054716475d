"""Files of a run that grow while it trains."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.journal.lines import Entry, encode_line

__all__ = ["RUN_FILE", "AppendedFile", "RunWriter"]

# The file of a run folder that holds the run.
RUN_FILE: Final = "run.jsonl"


@final
class AppendedFile:
    r"""A text file that grows at its end, and whose lines are safe from a kill as soon as they are written.

    Nothing is kept back: what was given to `write` is with the operating system when it returns. A process that was forked off writes
    nothing. When the disk is full, or gone, a warning says so once, and nothing more is written: training goes on.

    Args:
        path: The file. Its folder is made where there is none. What it holds already stays.

    Attributes:
        path: The file.
        is_new: Whether there was nothing in it.

    Raises:
        ConfigurationError: The file cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = AppendedFile(Path(mkdtemp(), "notes.txt"))
        >>> file.write("first\nsecond\n")
        >>> file.path.read_text().split(), file.is_new
        (['first', 'second'], True)
        >>> file.close()
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Final = Path(path)
        self._process = os.getpid()
        self._descriptor: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            last = self._last_byte(self._open())
        except OSError as error:
            raise ConfigurationError(f"Cannot write {self.path}: {error.strerror or error}. Name another folder for the run.") from error
        self.is_new: Final = not last
        # A process that was killed while it wrote left a line without its end, which the next one must not become a part of.
        self._torn = b"\n" if last not in {b"", b"\n"} else b""

    def _open(self) -> int:
        # Windows would write its own ends of lines. A program that is started by the script has no business with the file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = descriptor = os.open(self.path, flags, 0o666)
        self._identity = _identity(descriptor)
        return descriptor

    def _last_byte(self, descriptor: int) -> bytes:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return b""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1)

    def write(self, text: str) -> None:
        """Writes whole lines, all of them at once.

        Warns:
            HalfstepWarning: They could not be written. Nothing more is.
        """
        if self._descriptor is None or not text or os.getpid() != self._process:
            return
        rest = memoryview(self._torn + text.encode("utf-8", "backslashreplace"))
        self._torn = b""
        try:
            descriptor = self._descriptor
            # A script that becomes a daemon closes all files, and the number may be that of one of its own by now.
            if _identity(descriptor) != self._identity:
                descriptor = self._open()
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            self.close()
            warnings.warn(
                f"Cannot write {self.path} any more: {error.strerror or error}. Training goes on, but what it does from here on is not "
                "kept there.",
                HalfstepWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Closes the file; nothing is written to it any more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and _identity(descriptor) == self._identity:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """What a descriptor stands for; `None` where it stands for nothing."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@final
class RunWriter:
    """Writes `run.jsonl` in the folder of a run: records of the run and its steps, alerts and actions, a line for each.

    A run that is resumed writes on at the end of the file.

    Args:
        folder: The folder; it is made where there is none.

    Raises:
        ConfigurationError: The file cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.records import Action
        >>> writer = RunWriter(mkdtemp())
        >>> writer.write([Action(rule="persistent_skips", step=40, action="warn", message="A warning was shown.")])
        >>> writer.close()
        >>> len(writer.path.read_text().splitlines())
        1
    """

    def __init__(self, folder: str | Path) -> None:
        self._file = AppendedFile(Path(folder, RUN_FILE))
        self.path: Final = self._file.path

    def write(self, entries: Iterable[Entry]) -> None:
        """Writes entries, all of them at once, as far as the operating system allows.

        Warns:
            HalfstepWarning: They could not be written, as the disk is full. Nothing more is written.
        """
        self._file.write("".join(map(encode_line, entries)))

    def close(self) -> None:
        """Closes the file; nothing is written to it any more."""
        self._file.close()
