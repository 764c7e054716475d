"""A run as lines of JSON, which `halfstep report` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from halfstep.journal import Entry, RunWriter
from halfstep.monitor.sinks.base import AbstractSink

__all__ = ["JsonlSink"]


@final
class JsonlSink(AbstractSink):
    """Writes `run.jsonl`: a line for each record.

    Args:
        folder: The folder of the run.

    Raises:
        ConfigurationError: The file cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> JsonlSink(folder).close()
        >>> [path.name for path in folder.iterdir()]
        ['run.jsonl']
    """

    __slots__ = ("_writer",)

    def __init__(self, folder: Path) -> None:
        self._writer = RunWriter(folder)

    def write(self, entries: Sequence[Entry]) -> None:
        """Writes all of them at once."""
        self._writer.write(entries)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
