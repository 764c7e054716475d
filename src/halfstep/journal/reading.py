"""Runs, read back from their folders."""

from __future__ import annotations

from json import JSONDecoder
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final, NoReturn, final

from halfstep.errors import ConfigurationError, RecordFormatError
from halfstep.journal.columns import ColumnBuilder
from halfstep.journal.lines import KINDS, Entry
from halfstep.journal.saved import SavedRun
from halfstep.journal.writing import RUN_FILE
from halfstep.records import RUN_SCHEMA, Action, Alert, RunRecord
from halfstep.records.codec import structure

__all__ = ["read_run"]

_HOW = f"A run folder holds {RUN_FILE}; `halfstep run train.py` makes one."


def read_run(path: str | Path) -> SavedRun:
    """Reads a run, also one that is still going on, or that was killed.

    A line that is torn, or that something else wrote, is passed over, and a note says so.

    Args:
        path: The folder of the run, or the file in it.

    Raises:
        ConfigurationError: There is no run.
        RecordFormatError: The file is no run, or one of a newer halfstep.

    Example:
        >>> read_run("no/such/run")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: There is no run at no/such/run. A run folder holds run.jsonl; `halfstep run train.py` makes one.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / RUN_FILE
            if not file.exists():
                raise ConfigurationError(f"There is no run in {path}. {_HOW}{_runs_below(file.parent)}")
        return _read(file)
    except FileNotFoundError as error:
        raise ConfigurationError(f"There is no run at {path}. {_HOW}") from error
    except OSError as error:
        raise ConfigurationError(f"Cannot read {file}: {error.strerror or error}.") from error


def _runs_below(folder: Path) -> str:
    """A hint for who names the folder of all runs."""
    found = sorted(child.parent for child in folder.glob(f"*/{RUN_FILE}"))
    return f" There are {len(found)} runs below it; the last is {found[-1]}." if found else ""


def _read(file: Path) -> SavedRun:
    reader = _Reader(file)
    with file.open("rb") as lines:
        for line in lines:
            reader.take(line)
    return reader.run()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} stands without quotes")


# `json.loads` looks for the encoding of each text, and makes a decoder for each.
_raw_decode: Final = JSONDecoder(parse_constant=_no_constant).raw_decode


def _parse(line: bytes) -> Any:
    text = line.decode().strip()
    plain, end = _raw_decode(text)
    if end < len(text):
        raise ValueError("more than one value")
    return plain


# Why lines are passed over: notes are made for each of these, and not for each line.
_TORN = "It is torn: its process ended while it wrote, or is writing still."
_BROKEN = "It is no JSON: its process was killed while it wrote, or something else wrote it."


@final
class _Reader:
    """Takes the lines of a run, one after the other.

    Args:
        file: Where they come from.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._line = 0
        self._steps = ColumnBuilder()
        self._runs: list[RunRecord] = []
        self._alerts: list[Alert] = []
        self._actions: list[Action] = []
        self._segments: list[int] = []
        self._ended: list[bool] = []
        self._alert_rows: list[int] = []
        self._alert_segments: list[int] = []
        # The number of a line, what sort of fault it has, and which one.
        self._faults: list[tuple[int, str, str]] = []

    def take(self, line: bytes) -> None:
        """Takes the next line.

        Raises:
            RecordFormatError: A newer halfstep wrote it.
        """
        self._line += 1
        try:
            plain = _parse(line)
        except (ValueError, RecursionError):
            if line.strip():
                why = _BROKEN if line.endswith(b"\n") else _TORN
                self._faults.append((self._line, why, why))
            return
        kind = plain.get("kind") if isinstance(plain, dict) else None
        if kind == "step":
            self._steps.add(self._line, plain)
        elif isinstance(kind, str) and kind in KINDS:
            self._take_entry(plain, KINDS[kind])
        else:
            self._faults.append((self._line, "kind", f"No kind of line that this halfstep knows: {short(kind)}."))

    def _take_entry(self, plain: dict[str, Any], cls: type[Entry]) -> None:
        schema = plain.get("schema")
        if cls is RunRecord and isinstance(schema, int) and schema > RUN_SCHEMA:
            raise RecordFormatError(
                f"{self._file} was written by a newer halfstep: its format has the number {schema}, and this one reads up to {RUN_SCHEMA}. "
                "Upgrade halfstep."
            )
        try:
            entry = structure(plain, cls)
        except RecordFormatError as error:
            self._faults.append((self._line, cls.__name__, str(error)))
            return
        if isinstance(entry, RunRecord):
            self._take_run(entry)
        elif isinstance(entry, Alert):
            self._alerts.append(entry)
            self._alert_rows.append(len(self._steps))
            self._alert_segments.append(max(len(self._segments) - 1, 0))
        elif isinstance(entry, Action):
            self._actions.append(entry)

    def _take_run(self, run: RunRecord) -> None:
        self._runs.append(run)
        if run.event == "started":
            if not self._segments and (len(self._steps) or self._alerts):  # The line of its start was lost.
                self._segments.append(0)
                self._ended.append(False)
            self._segments.append(len(self._steps))
            self._ended.append(False)
        elif self._ended:
            self._ended[-1] = True
        else:
            self._segments.append(0)
            self._ended.append(True)

    def run(self) -> SavedRun:
        """The run that the lines are.

        Raises:
            RecordFormatError: None of them is a line of a run.
        """
        if not (len(self._steps) or self._runs or self._alerts or self._actions):
            found = f"none of its {self._line} lines is one of a run" if self._line else "it is empty"
            raise RecordFormatError(f"{self._file} holds no run: {found}. {_HOW}")
        folder = self._file.parent
        return SavedRun(
            folder=folder,
            name=folder.resolve().name if self._file.name == RUN_FILE else self._file.stem,
            starts=tuple(run for run in self._runs if run.event == "started"),
            ends=tuple(run for run in self._runs if run.event == "ended"),
            steps=self._steps.columns(),
            alerts=tuple(self._alerts),
            actions=tuple(self._actions),
            notes=self._notes(),
            segments=tuple(self._segments) or (0,),
            ended=tuple(self._ended) or (False,),
            alert_rows=tuple(self._alert_rows),
            alert_segments=tuple(self._alert_segments),
        )

    def _notes(self) -> tuple[str, ...]:
        kinds: dict[str, list[tuple[int, str]]] = {}
        for line, kind, why in sorted([*self._faults, *((line, "StepRecord", why) for line, why in self._steps.faults)]):
            kinds.setdefault(kind, []).append((line, why))
        return tuple(
            f"Line {lines[0][0]} was passed over. {lines[0][1]}"
            if len(lines) == 1
            else f"{len(lines)} lines were passed over, line {lines[0][0]} the first of them. {lines[0][1]}"
            for lines in kinds.values()
        )
