"""The steps of a run as a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, final

from halfstep.errors import ConfigurationError
from halfstep.journal import AppendedFile, Entry
from halfstep.monitor.sinks.base import AbstractSink
from halfstep.records import StepRecord

__all__ = ["CsvSink"]

_FILE: Final = "steps.csv"
_COLUMNS: Final = tuple(field.name for field in fields(StepRecord))
_values_of = attrgetter(*_COLUMNS)


@final
class CsvSink(AbstractSink):
    """Writes `steps.csv`: a row for each step, a column for each field of its record.

    Numbers that are not finite are `nan`, `inf` and `-inf`; what is not known is empty; control characters of a name are escaped, so that a
    row is a line. A run that is resumed adds its rows.

    Args:
        folder: The folder of the run.

    Raises:
        ConfigurationError: The file cannot be written, or is there with other columns.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> CsvSink(folder).close()
        >>> (folder / "steps.csv").read_text()[:26]
        'step,skipped,scale,loss,gr'
    """

    __slots__ = ("_file",)

    def __init__(self, folder: Path) -> None:
        self._file = AppendedFile(folder / _FILE)
        header = _table([_COLUMNS])
        if self._file.is_new:
            self._file.write(header)
            return
        with self._file.path.open(encoding="utf-8", errors="replace", newline="") as file:
            found = file.readline()
        if found != header:
            self._file.close()
            raise ConfigurationError(
                f"Cannot add to {self._file.path}: its columns are {found.strip()[:200]!r}, and those of this halfstep are "
                f"{header.strip()!r}. Move the file away, or name another folder for the run."
            )

    def write(self, entries: Sequence[Entry]) -> None:
        """Writes a row for each step."""
        self._file.write(_table([map(_cell, _values_of(entry)) for entry in entries if isinstance(entry, StepRecord)]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        return value.encode("unicode_escape").decode("ascii")
    return str(value).lower() if isinstance(value, bool) else value


def _table(rows: Sequence[Any]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
