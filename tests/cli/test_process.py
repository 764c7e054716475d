"""What only a real process shows: pipes, terminals, signals."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.records import Comparison
from tests.cli.tasks import SQUARE, write_task

ESCAPE = "\x1b"

SLOW = """
def loss(model, batch):
    time.sleep(0.02)
    return model(batch).square().mean()
"""

Command = Callable[..., list[str]]


@pytest.fixture
def words(tmp_path: Path) -> Command:
    """The words of a real command: few steps of a tiny task, unless told otherwise."""

    def of(*more: str, source: str = SQUARE) -> list[str]:
        small = ["--steps", "1", "--warmup", "1", "--seeds", "1", "--precisions", "fp32", "--device", "cpu"]
        return [sys.executable, "-m", "halfstep", "compare", write_task(tmp_path, source), *small, *more]

    return of


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}


class TestProcess:
    def test_a_pipe_gets_no_progress_bar_and_no_colours(self, words: Command) -> None:
        done = subprocess.run(words(), capture_output=True, text=True, env=environment(), timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Nothing was compared with fp32." in done.stdout
        assert ESCAPE not in done.stdout

    def test_a_reader_that_leaves_is_no_finding_and_loses_no_file(self, words: Command, tmp_path: Path) -> None:
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            done = subprocess.run(
                words("--json", str(tmp_path / "a.json")),
                stdout=closed,
                stderr=subprocess.PIPE,
                env=environment(),
                timeout=120,
                check=False,
            )
        assert done.returncode == 0
        assert b"Traceback" not in done.stderr
        assert b"Exception ignored" not in done.stderr
        assert Comparison.from_json((tmp_path / "a.json").read_text()).runs

    def test_ctrl_c_prints_and_writes_what_is_known(self, words: Command, tmp_path: Path) -> None:
        json_file, html_file, started = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "started"
        source = SLOW.replace("time.sleep", f"open({str(started)!r}, 'a').write('.'); time.sleep")
        command = words("--steps", "100000", "--precisions", "bf16", "--json", str(json_file), "--html", str(html_file), source=source)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
            wait_until(lambda: started.exists() and started.stat().st_size > 12, process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "The comparison was interrupted before all steps had run." in out
        assert "Traceback" not in err
        comparison = Comparison.from_json(json_file.read_text())
        assert comparison.interrupted
        assert 1 <= comparison.runs[0].steps < 100000
        assert html_file.stat().st_size > 10000

    def test_ctrl_c_before_there_is_a_result(self, words: Command, tmp_path: Path) -> None:
        started = tmp_path / "started"
        source = f"{SQUARE}\nopen({str(started)!r}, 'w').write('.')\ntime.sleep(100)"
        with subprocess.Popen(
            words("--json", str(tmp_path / "a.json"), source=source),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            wait_until(lambda: started.exists() and started.stat().st_size > 0, process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert (out, err.strip()) == ("", "halfstep: interrupted before there was a result.")
        assert not (tmp_path / "a.json").exists()

    def test_a_terminal_shows_a_progress_bar(self, words: Command) -> None:
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            words("--steps", "40", source=SLOW), stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True
        ) as process:
            os.close(theirs)
            shown = read_terminal(ours)
            out, _ = process.communicate(timeout=60)
        os.close(ours)
        assert process.returncode == 0
        assert "fp32, seed 0" in shown
        assert "/41" in shown
        assert ESCAPE in shown
        assert ESCAPE not in out, "standard output is no terminal"


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never got there"
        time.sleep(0.02)


def read_terminal(descriptor: int) -> str:
    """All that is shown on a terminal until its last writer is gone."""
    shown = b""
    while select.select([descriptor], [], [], 120)[0]:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux reports the end of a terminal so.
            break
        if not part:
            break
        shown += part
    return shown.decode(errors="replace")
