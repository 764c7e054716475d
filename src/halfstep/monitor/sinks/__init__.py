"""Where the records of a run go to: one sink a file, each with a name in `SINKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from halfstep.errors import ConfigurationError, InvalidTypeError, did_you_mean
from halfstep.monitor.sinks.base import AbstractSink
from halfstep.monitor.sinks.console import ConsoleSink
from halfstep.monitor.sinks.csv import CsvSink
from halfstep.monitor.sinks.jsonl import JsonlSink
from halfstep.monitor.sinks.tensorboard import TensorBoardSink

__all__ = ["SINKS", "AbstractSink", "ConsoleSink", "CsvSink", "JsonlSink", "TensorBoardSink", "check_sinks", "open_sinks"]

# What each name stands for, in the folder of a run.
SINKS: Final[Mapping[str, Callable[[Path], AbstractSink]]] = MappingProxyType(
    {
        "jsonl": JsonlSink,
        "csv": CsvSink,
        "tensorboard": TensorBoardSink,
        "console": lambda _: ConsoleSink(),
        "alerts": lambda _: ConsoleSink(progress=False),
    }
)


def check_sinks(sinks: Sequence[str | AbstractSink]) -> None:
    """Makes sure that sinks are sinks, or names of some.

    Args:
        sinks: Names, or sinks of one's own.

    Raises:
        ConfigurationError: No sink has such a name.
        InvalidTypeError: Something is neither a name nor a sink.

    Example:
        >>> check_sinks(["jsonl", "tensorbord"])
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: There is no sink 'tensorbord'. Did you mean 'tensorboard'? Allowed are jsonl, csv, ...
    """
    if isinstance(sinks, str):
        raise InvalidTypeError(f"sinks is the text {sinks!r}. Pass several names, such as [{sinks!r}].")
    for sink in sinks:
        if not isinstance(sink, str | AbstractSink):
            raise InvalidTypeError(f"sinks holds {sink!r}, which is neither a name nor an AbstractSink. Names are {', '.join(SINKS)}.")
        if isinstance(sink, str) and sink not in SINKS:
            raise ConfigurationError(f"There is no sink {sink!r}.{did_you_mean(sink, known=SINKS)} Allowed are {', '.join(SINKS)}.")


def open_sinks(sinks: Sequence[str | AbstractSink], *, folder: Path) -> tuple[AbstractSink, ...]:
    """Sinks that are ready to be written to, one for each name; `console` shows what `alerts` would, too.

    Args:
        sinks: Names, or sinks of one's own.
        folder: The folder of the run.

    Raises:
        ConfigurationError: No sink has such a name, or one cannot be opened.
        InvalidTypeError: Something is neither a name nor a sink.

    Example:
        >>> [type(sink).__name__ for sink in open_sinks(["alerts", "console"], folder=Path("not/needed"))]
        ['ConsoleSink']
    """
    check_sinks(sinks)
    wanted = [sink for sink in dict.fromkeys(sinks) if not (sink == "alerts" and "console" in sinks)]
    opened: list[AbstractSink] = []
    try:
        for sink in wanted:
            opened.append(SINKS[sink](folder) if isinstance(sink, str) else sink)
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return tuple(opened)
