"""A run as it goes on, on standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean
from typing import IO, Final, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from halfstep.journal import Entry
from halfstep.monitor.sinks.base import AbstractSink
from halfstep.records import Action, Alert, StepRecord

__all__ = ["ConsoleSink"]

# Seconds between two looks at the run: on a terminal, where a line is drawn anew, and in a file, where one is added.
_DRAWN: Final = 0.25
_ADDED: Final = 30.0

_STYLES: Final = {"info": "cyan", "warning": "yellow", "error": "bold red"}


@final
class ConsoleSink(AbstractSink):
    """Shows alerts and actions, and how far the run is: in a line that is drawn anew on a terminal, in a line now and then elsewhere.

    Args:
        stream: Where; `None` for standard error.
        progress: Whether to show how far the run is.

    Example:
        >>> import sys
        >>> sink = ConsoleSink(sys.stdout, progress=False)
        >>> sink.write([Alert(rule="skip_rate", step=40, message="9 of 40 steps were skipped.", advice="", site=None, severity="warning")])
        halfstep warning: skip_rate at step 40: 9 of 40 steps were skipped.
        >>> sink.close()
    """

    __slots__ = ("_console", "_last", "_live", "_progress", "_shown", "_skips", "_times")

    def __init__(self, stream: IO[str] | None = None, *, progress: bool = True) -> None:
        self._console = _QuietConsole(file=stream, stderr=stream is None, highlight=False)
        self._progress = progress
        self._live: Live | None = None
        self._shown = -math.inf if self._console.is_terminal else time.monotonic()
        self._skips = 0
        self._times: list[float] = []
        self._last: StepRecord | None = None

    def write(self, entries: Sequence[Entry]) -> None:
        """Shows alerts and actions at once, and the last step when it is time."""
        for entry in entries:
            if isinstance(entry, StepRecord):
                self._skips += entry.skipped
                self._times.append(entry.step_time_s)
                self._last = entry
            elif isinstance(entry, Alert):
                self._print(f"halfstep {entry.severity}: {entry}", style=_STYLES[entry.severity])
            elif isinstance(entry, Action):
                self._print(f"halfstep: {entry.message}", style="bold")
        if self._progress and self._last is not None:
            self._show(self._last)
        else:
            self._times.clear()

    def close(self) -> None:
        """Takes the line off the terminal."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show(self, record: StepRecord) -> None:
        now = time.monotonic()
        if now - self._shown < (_DRAWN if self._console.is_terminal else _ADDED):
            return
        self._shown = now
        line = self._text(f"halfstep: {_progress(record, skips=self._skips, times=self._times)}")
        self._times.clear()
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
            return
        line.no_wrap, line.overflow = True, "ellipsis"
        if self._live is None:
            # The script's own streams are left as they are; no thread draws, and none is there when the script forks.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=True)
            self._live.start()
            self._console.show_cursor()  # It would stay hidden if the process were killed.
        self._live.update(line, refresh=True)

    def _print(self, content: str, *, style: str) -> None:
        text = self._text(content)
        text.stylize(style, 0, content.find(":"))
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _text(self, content: str) -> Text:
        """Text that means only itself: no markup, no control characters, nothing that the stream cannot take."""
        encoding = self._console.encoding
        content = "".join(character if character.isprintable() else " " for character in content)
        return Text(content.encode(encoding, "backslashreplace").decode(encoding))


def _progress(record: StepRecord, *, skips: int, times: Sequence[float]) -> str:
    known = [each for each in times if math.isfinite(each)]
    parts = [
        f"step {record.step:,}" if record.epoch is None else f"epoch {record.epoch}, step {record.step:,}",
        f"loss {record.loss:.4g}" if not math.isnan(record.loss) else "",
        f"scale {record.scale:g}" if record.scale != 1.0 else "",
        f"{skips:,} skipped" if skips else "",
        f"{1000 * fmean(known):.3g} ms/step" if known else "",
    ]
    return ", ".join(part for part in parts if part)


@final
class _QuietConsole(Console):
    """A console whose reader may leave: rich would end the program, and take the script's own standard output with it."""

    def on_broken_pipe(self) -> None:
        """Passes the error on."""
        self.quiet = True
        raise  # noqa: PLE0704 - rich calls this where it handles the error
