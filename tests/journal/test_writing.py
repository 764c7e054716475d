"""Files that grow while a run trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError, HalfstepWarning
from halfstep.journal import AppendedFile, RunWriter, encode_line, read_run
from halfstep.records import Action

ACTION = Action(rule="persistent_skips", step=40, action="warn", message="A warning was shown.")
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def test_the_folder_is_made_and_lines_are_there_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a" / "b")
    assert writer.path == tmp_path / "a" / "b" / "run.jsonl"
    writer.write([ACTION, ACTION])
    assert writer.path.read_text(encoding="utf-8") == encode_line(ACTION) * 2
    writer.write([])
    writer.close()
    writer.close()
    writer.write([ACTION])
    assert writer.path.read_text(encoding="utf-8") == encode_line(ACTION) * 2


def test_all_lines_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.write

    def count(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    writer = RunWriter(tmp_path)
    monkeypatch.setattr(os, "write", count)
    writer.write([ACTION] * 500)
    assert sizes == [500 * len(encode_line(ACTION))]
    writer.close()


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    writer = RunWriter(tmp_path)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    writer.write([ACTION] * 3)
    writer.close()
    assert writer.path.read_text(encoding="utf-8") == encode_line(ACTION) * 3


@pytest.mark.parametrize(("before", "between"), [("", ""), ("line\n", ""), ("li", "\n"), ("\n", ""), ("line\nli", "\n")])
def test_a_torn_line_is_ended_before_the_next_one(tmp_path: Path, before: str, between: str) -> None:
    path = tmp_path / "file"
    path.write_text(before, encoding="utf-8")
    file = AppendedFile(path)
    assert file.is_new == (not before)
    assert path.read_text(encoding="utf-8") == before
    file.write("first\n")
    file.write("second\n")
    file.close()
    assert path.read_text(encoding="utf-8") == f"{before}{between}first\nsecond\n"


def test_two_writers_keep_each_others_lines(tmp_path: Path) -> None:
    one, other = RunWriter(tmp_path), RunWriter(tmp_path)
    for _ in range(3):
        one.write([ACTION])
        other.write([ACTION])
    one.close()
    other.close()
    assert len(read_run(tmp_path).actions) == 6


def test_text_that_no_file_takes_is_escaped(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "file")
    file.write("半 \udc80\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == "半 \\udc80\n".encode()


@needs_dev_full
def test_a_full_disk_is_told_once_and_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    writer = RunWriter(tmp_path)
    with pytest.warns(HalfstepWarning, match=r"Cannot write .*run\.jsonl any more: No space left on device\. Training goes on") as caught:
        writer.write([ACTION])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write([ACTION])
        writer.close()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"Cannot write .*run\.jsonl: .+\. Name another folder for the run\."):
        RunWriter(tmp_path / name)


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(ConfigurationError, match=r"Cannot write .*run\.jsonl: Is a directory\."):
        RunWriter(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    child = os.fork()
    if child == 0:
        writer.write([ACTION])
        os._exit(0)
    os.waitpid(child, 0)
    assert writer.path.read_bytes() == b""
    writer.write([ACTION])
    writer.close()
    assert len(read_run(tmp_path).actions) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_keeps_what_was_flushed(tmp_path: Path) -> None:
    code = f"""
import os, signal
from halfstep.monitor import Monitor
from halfstep.records import StepRecord
monitor = Monitor({str(tmp_path)!r}, sinks=["jsonl"], flush_steps=10, flush_seconds=1e9)
for step in range(1, 36):
    monitor.observe(StepRecord(step=step, skipped=False, scale=1.0, loss=0.5, grad_norm=None, lr=0.1, step_time_s=0.1, memory_bytes=None,
        precision="bf16"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    run = read_run(tmp_path)
    assert run.steps.step.tolist() == [*range(1, 31)]
    assert (len(run.starts), run.ends, run.ended, run.notes) == (1, (), (False,), ())
