"""A run as it goes on."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from typing import Any, final

import pytest

from halfstep.monitor import ConsoleSink
from halfstep.records import Action, Alert, Site
from tests.monitor.toy_rules import step

ALERT = Alert(
    rule="clip_before_unscale",
    step=2,
    message="Gradients are clipped [bold]while they are scaled[/bold].",
    advice="Unscale first.",
    site=Site(module="unknown", file="train.py", line=9),
    severity="error",
)
SHOWN = (
    "halfstep error: clip_before_unscale at step 2 (train.py:9): Gradients are clipped [bold]while they are scaled[/bold]. Unscale first.\n"
)


@final
class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@final
class Clock:
    """A time that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


def test_alerts_and_actions_are_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(progress=False)
    sink.write([step(1), ALERT, step(2), Action(rule="r", step=2, action="fall_back", message="The run goes on in bf16.")])
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{SHOWN}halfstep: The run goes on in bf16.\n"


def test_in_a_file_a_line_is_added_now_and_then(clock: Clock) -> None:
    sink = ConsoleSink(stream := io.StringIO())
    for number in range(1, 80):
        clock.now += 1
        sink.write([step(number, skipped=number == 3, step_time_s=0.01 if number <= 30 else 0.02)])
    sink.close()
    assert stream.getvalue().splitlines() == [
        "halfstep: step 30, loss 0.5, scale 65536, 1 skipped, 10 ms/step",
        "halfstep: step 60, loss 0.5, scale 65536, 1 skipped, 20 ms/step",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"epoch": 3}, "epoch 3, step 1,234, loss 0.5, scale 65536, 10 ms/step"),
        ({"loss": float("nan"), "scale": 1.0, "step_time_s": float("nan")}, "step 1,234"),
        ({"loss": float("inf"), "skipped": True}, "step 1,234, loss inf, scale 65536, 1 skipped, 10 ms/step"),
    ],
)
def test_what_is_not_known_is_left_out(clock: Clock, changes: dict[str, Any], line: str) -> None:
    sink = ConsoleSink(stream := io.StringIO())
    clock.now += 30
    sink.write([step(1234, **changes)])
    assert stream.getvalue() == f"halfstep: {line}\n"


def test_on_a_terminal_a_line_is_drawn_at_most_four_times_a_second(clock: Clock) -> None:
    sink = ConsoleSink(stream := Terminal())
    for number in range(1, 101):
        clock.now += 0.01
        sink.write([step(number)])
    drawn = re.findall(r"step (\d+)", stream.getvalue())
    assert 4 <= len({*drawn}) <= 5
    assert drawn[0] == "1"
    sink.close()
    # The line is gone and the cursor is where it was; nothing was written that ends it.
    assert "\x1b[2K" in stream.getvalue()
    length = len(stream.getvalue())
    sink.close()
    assert len(stream.getvalue()) == length


def test_on_a_terminal_the_cursor_is_never_left_hidden(clock: Clock) -> None:
    sink = ConsoleSink(stream := Terminal())
    sink.write([step(1)])
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    sink.close()


def test_on_a_terminal_alerts_stand_above_the_line(clock: Clock) -> None:
    sink = ConsoleSink(stream := Terminal())
    sink.write([step(1)])
    sink.write([ALERT])
    sink.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert SHOWN.strip() in text
    assert text.index("step 1,") < text.index("halfstep error") < text.rindex("step 1,")


def test_the_streams_of_the_script_are_left_alone(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = sys.stdout, sys.stderr
    sink = ConsoleSink(Terminal())
    sink.write([step(1), ALERT])
    assert sys.stdout is out
    assert sys.stderr is err
    sink.close()
    assert capsys.readouterr() == ("", "")


def test_without_progress_there_is_no_line(clock: Clock) -> None:
    sink = ConsoleSink(stream := Terminal(), progress=False)
    clock.now += 100
    sink.write([step(1)])
    sink.close()
    assert stream.getvalue() == ""


def test_text_means_only_itself() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii", newline="\n")
    sink = ConsoleSink(stream, progress=False)
    sink.write([Alert(rule="r", step=1, message="半 \x1b[31m\nred :warning:", advice="", site=None, severity="info")])
    stream.flush()
    assert raw.getvalue() == b"halfstep info: r at step 1: \\u534a  [31m red :warning:\n"


def test_a_reader_that_left_is_an_error_and_not_the_end_of_the_program() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        sink = ConsoleSink(stream, progress=False)
        with pytest.raises(BrokenPipeError):
            sink.write([ALERT])
        # What is still in the buffer of the stream is of no use to anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
