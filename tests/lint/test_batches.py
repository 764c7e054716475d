"""Many files at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from halfstep.lint import batches
from halfstep.lint.batches import Job, check_files
from tests.lint.toy_rules import TOYS

CODES = frozenset({"HS000", "HS901", "HS902"})


def jobs(folder: Path, *texts: str) -> list[Job]:
    found = []
    for number, text in enumerate(texts):
        path = folder / f"{number:03}.py"
        path.write_text(text)
        found.append(Job(path=path, codes=CODES, allowed=frozenset({"safe"})))
    return found


@pytest.mark.parametrize("count", [0, 1, 19, 20, 150])
def test_what_came_of_each_is_in_their_order(tmp_path: Path, count: int) -> None:
    texts = ["old_scaler\n" * (number % 3) for number in range(count)]
    checked = list(check_files(jobs(tmp_path, *texts), TOYS))
    assert [Path(each.path).name for each in checked] == [f"{number:03}.py" for number in range(count)]
    assert [each.fixed for each in checked] == [number % 3 for number in range(count)]
    assert all((tmp_path / f"{number:03}.py").read_text() == text for number, text in enumerate(texts))


_IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pathlib import Path
from halfstep.lint import batches
from tests.lint.test_batches import TOYS, jobs

if __name__ == "__main__":
    method, folder = sys.argv[1:]
    batches._start_method = lambda: method
    batches._cores = lambda: 3
    checked = list(batches.check_files(jobs(Path(folder), *["undecided_scaler\\n"] * 50), TOYS))
    assert "torch" not in sys.modules
    print([len(each.violations) for each in checked] == [1] * 50)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not copied there")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_may_be_started_in_any_way(tmp_path: Path, method: str) -> None:
    # This process has threads and torch in it, and must not be copied.
    script = tmp_path / "script.py"
    script.write_text(_IN_A_PROCESS_OF_ITS_OWN)
    folder = tmp_path / "files"
    folder.mkdir()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "src")))}
    done = subprocess.run(
        [sys.executable, str(script), method, str(folder)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_file_that_cannot_be_read_is_a_failure_of_its_own(tmp_path: Path) -> None:
    found = jobs(tmp_path, "old_scaler", "old_scaler", "old_scaler")
    found[1].path.unlink()
    checked = list(check_files(found, TOYS))
    assert [len(each.failures) for each in checked] == [0, 1, 0]
    assert checked[1].failures[0] == f"Cannot read {found[1].path}: No such file or directory."


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied only there")
def test_a_process_is_copied_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert batches._start_method() == "fork"
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert batches._start_method() == "spawn"
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert batches._start_method() == "spawn"


def test_the_collection_of_garbage_is_as_before(tmp_path: Path) -> None:
    before = gc.get_threshold()
    assert len(list(check_files(jobs(tmp_path, "old_scaler"), TOYS))) == 1
    assert gc.get_threshold() == before


def test_one_core_needs_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_cores", lambda: 1)
    monkeypatch.setattr(batches, "_check_together", lambda *_: pytest.fail("a process was started"))
    assert len(list(check_files(jobs(tmp_path, *["old_scaler"] * 30), TOYS))) == 30


def test_a_process_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_cores", lambda: 2)
    monkeypatch.setattr(batches, "_start_method", lambda: "spawn")
    with pytest.raises(ChildProcessError, match="ended from outside; is there enough memory"):
        list(check_files(jobs(tmp_path, *["old_scaler"] * 30), (Killed(), *TOYS)))  # type: ignore[arg-type]


class Killed:
    """What ends the process that unpickles it, as a lack of memory does."""

    code = "HS909"
    name = "killed"
    severity = "error"

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (9,)


needs_processes = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs several processes, and a list of them"
)


def start(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that is far from done, and the processes that check files for it."""
    for number in range(400):
        (tmp_path / f"{number}.py").write_text(
            "import torch\nscaler = torch.amp.GradScaler()\n" + "x = [scaler.scale(x) for x in y]\n" * 400
        )
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep", "lint", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while len(found := children.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # They have begun to ignore Ctrl-C, and to look after the one that started them.
    return process, [int(number) for number in found]


@needs_processes
def test_ctrl_c_ends_all_processes_without_a_traceback(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "halfstep: interrupted before there was a result.")


@needs_processes
@pytest.mark.parametrize("reason", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, reason: signal.Signals) -> None:
    process, children = start(tmp_path)
    process.send_signal(reason)
    # Each of them holds the other ends of these pipes.
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (-reason, "")
    deadline = time.monotonic() + 60
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
