"""What a script does by the launcher is what it does by Python: real processes, compared byte for byte."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.watching.launches import compare, launch, start

# What a script can know about itself, at its beginning and when all else has ended.
INSIGHT = '''
"""The documentation."""
import atexit, inspect, linecache, os, pickle, sys, threading, warnings

class Model:
    weight: int = 3

def show(when):
    main = sys.modules["__main__"]
    own = {name: value for name, value in vars(main).items() if name.startswith("__") and name != "__builtins__"}
    print(when, list(vars(main)), str(own).replace(hex(id(own.get("__loader__"))), ""))
    print(globals() is vars(main), type(__builtins__), sys.argv, sys.path[0], len(sys.path), os.getcwd(), __debug__, sys.flags)
    print(type(main.__loader__), getattr(main.__loader__, "path", ""), getattr(main.__loader__, "name", ""), main.__spec__ is None)
    print(pickle.dumps(Model()), pickle.loads(pickle.dumps(Model())).weight, Model.__module__)
    try:
        print(inspect.getsource(show).count("inspect"), inspect.getsourcefile(show), inspect.getmodule(show) is main)
    except (OSError, TypeError) as error:
        print("no source", type(error).__name__, error)
show("now")
print(show.__code__.co_filename, show.__code__.co_flags)
print(sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__, sys.getrecursionlimit())
warnings.warn("here")
warnings.warn("old", DeprecationWarning)
sys.stdout.write("not flushed before the end, ")
atexit.register(show, "atexit")

def linger():
    threading.main_thread().join()
    show("thread")

threading.Thread(target=linger).start()
if sys.argv[1:] == ["raise"]:
    raise ValueError("after all")
if sys.argv[1:] == ["exit"]:
    sys.exit(3)
'''

CHAINED = """
import os, sys

def hook(kind, error, trace):
    import traceback
    os.write(1, b"past the buffer")
    print("hook", kind, trace is error.__traceback__, sys.last_traceback is trace, sys.last_value is error, sys.excepthook is hook)
    traceback.print_exception(kind, error, trace)
    if "--exit" in sys.argv:
        sys.exit(7)
    if "--fail" in sys.argv:
        raise LookupError("in the hook")

def inner():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("chained") from error

if "--hook" in sys.argv:
    sys.excepthook = hook
try:
    inner()
except RuntimeError:
    if sys.version_info >= (3, 11) and "--group" in sys.argv:
        raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("more", [TypeError(2)])])
    print("before")
    assert False, "in the course of it"
"""

CHILDREN = """
import multiprocessing, os, sys

class Point:
    def __init__(self, x):
        self.x = x

print("imported", __name__, "halfstep" in sys.modules and __name__ == "__mp_main__", flush=True)

def work(point, queue, method):
    main = sys.modules["__main__"]
    own = method != "fork" and any(name.partition(".")[0] in {"halfstep", "click"} for name in sys.modules)
    there = (main.__name__, getattr(main, "__file__", None), sys.argv, sys.path[0], own)
    queue.put((method, type(point).__module__, Point(point.x + 1), *there))

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(Point(1), queue, method))
        child.start()
        found = queue.get()
        child.join()
        print(found[:2], type(found[2]) is Point, found[2].x, found[3:], child.exitcode, flush=True)
    if os.fork() == 0:
        print("forked", flush=True)
        sys.exit(0)
    print("child", os.waitstatus_to_exitcode(os.wait()[1]))
"""

IMPORTED = """
import os, sys
from frame import work
print("imported", os.environ["THREADS"], __spec__.origin, __loader__ is __spec__.loader, sys.modules["frame"].work is work, flush=True)
"""

IMPORTING = """
import importlib.util, os, sys
print(importlib.util.find_spec("frame").origin, flush=True)
os.environ["THREADS"] = "1"
if os.fork() == 0:
    import frame
    os._exit(0)
os.wait()
os.environ["THREADS"] = "2"
print("before", flush=True)
import frame
print("after", [type(finder) for finder in sys.meta_path], type(frame.__loader__), frame.__spec__.loader is frame.__loader__, flush=True)
"""

LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, place):
        return torch.tensor(place), __name__

if __name__ == "__main__":
    for numbers, names in DataLoader(Numbers(), batch_size=2, num_workers=2):
        print(numbers.tolist(), names)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that scripts are run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def write(folder: Path, source: str | bytes, name: str = "train.py") -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(source if isinstance(source, bytes) else source.encode())
    return name


class TestInsight:
    @pytest.mark.parametrize("ending", ["", "raise", "exit"])
    def test_a_file(self, here: Path, ending: str) -> None:
        file = write(here, INSIGHT, "deeper/train.py")
        (here / "link.py").symlink_to(file)
        ended = compare(here, "./link.py", *ending.split())
        assert ended.status == {"": 0, "raise": 1, "exit": 3}[ending]
        assert b"now ['__name__', '__doc__', " in ended.out
        assert b"thread [" in ended.out
        assert f"{here}/./link.py:".encode() not in ended.out
        assert f"{here}/./link.py:" in ended.err
        assert ended.told == ("begins", f"ends: {({'': 'finished', 'raise': 'ValueError', 'exit': 'SystemExit 3'})[ending]}", "ended")

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (("-m", "package.train", "--log-dir", "x", "-m", "--", "-h"), "package/train.py"),
            (("-m", "package"), "package/__main__.py"),
            (("folder", "--quiet"), "folder/__main__.py"),
        ],
    )
    def test_a_module_a_package_and_a_folder(self, here: Path, words: tuple[str, ...], name: str) -> None:
        write(here, INSIGHT, name)
        write(here, "import sys; print(sys.argv, sys.path[0], sys.modules['__main__'].__spec__, flush=True)", "package/__init__.py")
        assert str(here / name).encode() in compare(here, *words).out

    def test_a_zip_file(self, here: Path) -> None:
        import zipfile  # noqa: PLC0415 - used here alone

        with zipfile.ZipFile(here / "all.zip", "w") as archive:
            archive.writestr("__main__.py", INSIGHT)
        assert b"all.zip/__main__.py" in compare(here, "all.zip", "raise").out

    @pytest.mark.parametrize("name", ["-", "/dev/stdin"])
    def test_standard_input(self, here: Path, name: str) -> None:
        data = f"{INSIGHT}\nimport sys; print(repr(sys.stdin.read()))\n1 / 0".encode()
        ended = compare(here, name, "raise", stdin=subprocess.PIPE, data=data)
        assert b"atexit [" in ended.out

    @pytest.mark.parametrize("words", [("train.py",), ("-m", "train"), ("folder",)])
    def test_flags_of_python(self, here: Path, words: tuple[str, ...]) -> None:
        write(here, INSIGHT)
        write(here, INSIGHT, "folder/__main__.py")
        flags = ["-P", "-O", "-W", "error::DeprecationWarning"]
        if words[0] == "-m":
            flags.remove("-P")  # Without it there is no module to be found.
        ended = compare(here, *words, flags=flags)
        assert "DeprecationWarning: old" in ended.err
        assert ended.status == 1

    @pytest.mark.parametrize(
        "source",
        [
            "# coding: latin-1\nprint('ä')\nraise ValueError('ö')".encode("latin-1"),
            "\N{ZERO WIDTH NO-BREAK SPACE}print('ä')\r\n\r\n1 / 0\r\n".encode(),
        ],
        ids=["cookie", "BOM"],
    )
    def test_encodings(self, here: Path, source: bytes) -> None:
        assert compare(here, write(here, source)).status == 1

    def test_a_compiled_file(self, here: Path) -> None:
        import py_compile  # noqa: PLC0415 - used here alone

        write(here, INSIGHT)
        py_compile.compile(str(here / "train.py"), cfile=str(here / "compiled.pyc"), dfile="train.py")
        assert b"SourcelessFileLoader" in compare(here, "compiled.pyc").out


class TestEndings:
    @pytest.mark.parametrize(
        ("statement", "status", "end"),
        [
            ("sys.exit('text')", 1, "ends: SystemExit text"),
            ("sys.exit()", 0, "ends: SystemExit None"),
            ("raise KeyboardInterrupt", -signal.SIGINT, "ends: KeyboardInterrupt"),
            ("print('written', flush=True); os._exit(4)", 4, None),
            ("exec('def broken(:')", 1, "ends: SyntaxError"),
            ("del sys.modules['__main__'], sys.stderr; sys.exit(5)", 5, None),
        ],
    )
    def test_out_of_the_script(self, here: Path, statement: str, status: int, end: str | None) -> None:
        file = write(here, f"import atexit, os, sys\natexit.register(print, 'atexit')\nprint('first')\n{statement}\n")
        # As one stream: the order is that of Python, too.
        joined = [start(here, file, ours=ours, stderr=subprocess.STDOUT) for ours in (False, True)]
        plain, ours = (process.communicate(timeout=60)[0] for process in joined)
        assert [process.returncode for process in joined] == [status, status]
        lines = ours.splitlines(keepends=True)
        told = [line.decode().removeprefix("halfstep: ").strip() for line in lines if line.startswith(b"halfstep: ")]
        assert b"".join(line for line in lines if not line.startswith(b"halfstep: ")) == plain
        assert told == ["begins", *([end, "ended"] if end else [])]
        if end:
            assert lines.index(b"first\n") < lines.index(f"halfstep: {end}\n".encode()), "what waited to be printed comes first"

    @pytest.mark.parametrize(
        "words", ["", "--group", "--hook", "--hook --exit", "--hook --fail", "-m"], ids=lambda words: words.strip() or "plain"
    )
    def test_chained_exceptions_and_hooks(self, here: Path, words: str) -> None:
        file = write(here, CHAINED)
        ended = compare(here, *(words.replace("-m", "-m train") if "-m" in words else f"{file} {words}").split())
        assert ended.status == (7 if "--exit" in words else 1)
        assert "Traceback (most recent call last):" in ended.err
        assert "launching" not in ended.err
        assert (b"hook <class 'AssertionError'> True True True True" in ended.out) == ("--hook" in words)
        assert ("Error in sys.excepthook:" in ended.err) == ("--fail" in words)
        assert ended.told[1].startswith("ends: ExceptionGroup" if words == "--group" else "ends: AssertionError")

    @pytest.mark.parametrize("source", ["def f(:\n", "x = '''\n\n", "if 1:\nx\n"])
    def test_a_syntax_error_is_python_s_and_begins_no_run(self, here: Path, source: str) -> None:
        ended = compare(here, write(here, source))
        assert ended.status == 1
        assert ended.err.startswith("  File ")
        assert not ended.told

    def test_ctrl_c(self, here: Path) -> None:
        source = "import time\ntry:\n    print('ready', flush=True); time.sleep(60)\nfinally:\n    print('finally')\n"
        # Without marks in the line, as it may come before the sleep, too.
        ended = compare(here, write(here, source), send=signal.SIGINT, flags=["-X", "no_debug_ranges"])
        assert ended.status == -signal.SIGINT
        assert ended.err.endswith("\nKeyboardInterrupt\n")
        assert ended.told == ("begins", "ends: KeyboardInterrupt", "ended")

    @pytest.mark.parametrize(("handler", "status"), [("", -signal.SIGTERM), ("signal.signal(15, lambda *_: sys.exit(5))", 5)])
    def test_sigterm(self, here: Path, handler: str, status: int) -> None:
        source = f"import signal, sys, time\n{handler}\nprint(signal.getsignal(15), signal.getsignal(2), flush=True); time.sleep(60)\n"
        source = source.replace("print(signal.getsignal(15),", "print(type(signal.getsignal(15)),")
        assert compare(here, write(here, source), send=signal.SIGTERM).status == status

    @pytest.mark.parametrize(("source", "status"), [("print('x' * 9)", 120), ("print('x' * 10**6)", 1)])
    def test_a_reader_that_leaves(self, here: Path, source: str, status: int) -> None:
        read, write_end = os.pipe()
        os.close(read)
        with os.fdopen(write_end, "wb") as closed:
            ended = compare(here, write(here, source), stdout=closed)
        assert ended.status == status
        assert "BrokenPipeError" in ended.err


class TestProcesses:
    def test_children(self, here: Path) -> None:
        ended = compare(here, write(here, CHILDREN))
        assert ended.status == 0
        assert ended.out.count(b"imported __mp_main__ False") == 2
        assert ended.out.count(b"True 2 (") == 3
        assert ended.out.endswith(b"forked\nchild 0\n")
        # The child that was forked by hand ran to the end of the script, too, and closed nothing.
        assert ended.told == ("begins", "ends: finished", "ended")

    def test_children_of_a_module(self, here: Path) -> None:
        write(here, CHILDREN, "package/train.py")
        ended = compare(here, "-m", "package.train")
        assert ended.out.count(b"imported __mp_main__ False") == 2

    def test_workers_of_a_data_loader(self, here: Path) -> None:
        ended = compare(here, write(here, LOADER))
        assert ended.out == b"".join(b"[%d, %d] ('__main__', '__main__')\n" % (n, n + 1) for n in (0, 2, 4))


class TestWatcher:
    def test_it_begins_with_an_import(self, here: Path) -> None:
        write(here, IMPORTED, "frame/__init__.py")
        write(here, "", "frame/work.py")
        write(here, IMPORTING)
        assert compare(here, "train.py", begins_after="frame").status == 0
        told = launch(here, "train.py", begins_after="frame", stderr=subprocess.STDOUT).out.splitlines()
        first_words = [line.split()[0] for line in told[1:]]
        assert first_words == [b"imported", b"before", b"imported", b"halfstep:", b"after", b"halfstep:", b"halfstep:"]

    def test_what_it_should_begin_with_is_not_imported(self, here: Path) -> None:
        for statement, status, told in (("", 0, 1), ("import frame", 1, 0), ("raise SystemExit(3)", 3, 0)):
            ended = compare(here, write(here, statement), begins_after="frame")
            assert ended.status == status
            assert ended.told == ("frame was not imported, so there was nothing to watch.",) * told

    def test_what_is_imported_after_the_script_begins_nothing(self, here: Path) -> None:
        write(here, "print('late')", "late.py")
        ended = compare(here, write(here, "import atexit\natexit.register(__import__, 'late')"), begins_after="late")
        assert ended.out == b"late\n"
        assert ended.told == ("late was not imported, so there was nothing to watch.",)

    def test_a_bug_of_halfstep_s_is_admitted(self, here: Path) -> None:
        ended = launch(here, write(here, "print('ran')"), watcher="bug")
        assert (ended.status, ended.out) == (2, b"")
        assert ended.err.endswith("\nRuntimeError: A bug.\n")
        assert ended.told == ("this is a bug in halfstep; please report it with the traceback above.",)

    def test_it_refuses(self, here: Path) -> None:
        ended = launch(here, write(here, "print('ran')"), watcher="refuse")
        assert (ended.status, ended.out, ended.err, ended.told) == (2, b"", "", ("No folder.",))

    @pytest.mark.parametrize(
        ("watcher", "statement", "status", "err"),
        [
            ("skips", "", 1, "halfstep.errors.PersistentSkipsError: 10 steps in a row were skipped.\n"),
            ("skips", "raise SystemExit(0)", 1, "halfstep.errors.PersistentSkipsError: 10 steps in a row were skipped.\n"),
            ("skips", "raise SystemExit(3)", 3, ""),
            ("full", "", 0, ""),
            ("full", "raise SystemExit('text')", 1, "text\n"),
        ],
    )
    def test_it_fails_at_the_end(self, here: Path, watcher: str, statement: str, status: int, err: str) -> None:
        ended = launch(here, write(here, statement), watcher=watcher)
        assert (ended.status, ended.err) == (status, err)
        why = "OSError: [Errno 28] No space left on device" if watcher == "full" else "10 steps in a row were skipped."
        assert any(why in line for line in ended.told) == (not err or err == "text\n")

    def test_a_second_ctrl_c(self, here: Path) -> None:
        source = "import time\nprint('ready', flush=True); time.sleep(60)\n"
        ended = launch(here, write(here, source), watcher="slow", interrupt=["script", "watcher"])
        assert ended.status == -signal.SIGINT
        assert ended.err.count("Traceback") == 1
        assert ended.err.endswith("\nKeyboardInterrupt\n")
        assert ended.told == ("the run's log could not be finished; what was written before is kept (KeyboardInterrupt).",)

    def test_ctrl_c_after_a_script_that_finished(self, here: Path) -> None:
        ended = launch(here, write(here, "print('ready', flush=True)"), watcher="slow", interrupt=["watcher"])
        assert (ended.status, ended.err) == (-signal.SIGINT, "KeyboardInterrupt\n")


class TestNothingToRun:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("trian.py",), "There is no 'trian.py' to run in "),
            (("-m", "package.nope"), "No module named package.nope."),
            (("-m", "package"), "No module named package.__main__; 'package' is a package and cannot be directly executed."),
            (("empty",), "can't find '__main__' module in '"),
            (("unreadable.py",), "Cannot read "),
        ],
    )
    def test_it_says_so(self, here: Path, words: tuple[str, ...], message: str) -> None:
        write(here, "", "package/__init__.py")
        (here / "empty").mkdir()
        (here / "unreadable.py").symlink_to("/proc/self/mem")
        ended = launch(here, *words)
        assert (ended.status, ended.out, ended.err) == (2, b"", "")
        assert any(line.startswith(message) for line in ended.told), ended.told
