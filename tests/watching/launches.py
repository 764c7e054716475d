"""Scripts run twice: by Python alone, and by the launcher, in processes that load no torch unless the script does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any, Literal

__all__ = ["Ending", "compare", "launch", "start"]

# Stands in for the command line, around a watcher that only says what it sees. Its words are those of `python`.
DRIVER = '''
import os, sys
from halfstep.errors import HalfstepError
from halfstep.watching import launching
from halfstep.watching.scripts import Script, check_script

WATCHER = """
import os, sys, time
from halfstep.errors import ConfigurationError, PersistentSkipsError

class Watcher:
    def __enter__(self):
        match os.environ.get("WATCHER", ""):
            case "refuse":
                raise ConfigurationError("No folder.")
            case "bug":
                raise RuntimeError("A bug.")
        print("halfstep: begins", file=sys.stderr, flush=True)

    def __exit__(self, kind, error, trace):
        what = f"SystemExit {error.code}" if kind is SystemExit else "finished" if kind is None else kind.__name__
        print("halfstep: ends:", what, file=sys.stderr, flush=True)
        match os.environ.get("WATCHER", ""):
            case "slow":
                time.sleep(60)
            case "skips":
                raise PersistentSkipsError("10 steps in a row were skipped.")
            case "full":
                raise OSError(28, "No space left on device")
        print("halfstep: ended", file=sys.stderr, flush=True)
"""

# Its frames are those of a module of the package.
exec(compile(WATCHER, os.path.join(os.path.dirname(launching.__file__), "stand_in.py"), "exec"))
words = sys.argv[1:]
is_module = words[0] == "-m"
target, *arguments = words[is_module:]
script = Script(target=target, arguments=tuple(arguments), is_module=is_module)
try:
    check_script(script)
except HalfstepError as error:
    sys.exit(print("halfstep:", error, file=sys.stderr) or 2)
launching.run_script(script, watcher=Watcher, begins_after=os.environ.get("BEGINS_AFTER"))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended: `told` are halfstep's own lines on standard error, which `err` is without."""

    status: int
    out: bytes
    err: str
    told: tuple[str, ...]


def start(
    folder: Path, *words: str, ours: bool, flags: Sequence[str] = (), watcher: str = "", begins_after: str | None = None, **settings: Any
) -> subprocess.Popen[bytes]:
    """Starts a script in a folder: as `python FLAGS... WORDS...` does, or with the launcher in between."""
    driver = folder.parent / "driver.py"
    if ours and not driver.exists():
        driver.write_text(DRIVER)
    variables = {"WATCHER": watcher, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": ""}
    if begins_after is not None:
        variables["BEGINS_AFTER"] = begins_after
    return subprocess.Popen(
        [sys.executable, *flags, *([str(driver)] if ours else []), *words],
        cwd=folder,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings},
        env={**os.environ, **variables},
    )


def end(process: subprocess.Popen[bytes]) -> Ending:
    out, err = process.communicate(timeout=60)
    lines = (err or b"").decode(errors="replace").splitlines(keepends=True)
    told = tuple(line.removeprefix("halfstep: ").rstrip("\n") for line in lines if line.startswith("halfstep: "))
    rest = "".join(line for line in lines if not line.startswith("halfstep: "))
    return Ending(status=process.returncode, out=out or b"", err=rest, told=told)


def launch(folder: Path, *words: str, interrupt: Sequence[Literal["script", "watcher"]] = (), **settings: Any) -> Ending:
    """Runs a script by the launcher, and sends Ctrl-C as soon as the script says that it is ready, or the watcher that it ends."""
    with start(folder, *words, ours=True, **settings) as process:
        for who in interrupt:
            stream, sign = (process.stdout, b"ready") if who == "script" else (process.stderr, b"halfstep: ends")
            assert stream is not None
            while (line := stream.readline()) and not line.startswith(sign):
                pass
            process.send_signal(signal.SIGINT)
        return end(process)


def compare(folder: Path, *words: str, send: signal.Signals | None = None, data: bytes | None = None, **settings: Any) -> Ending:
    """Runs a script by Python and by the launcher, finds them alike, and returns how the latter ended.

    Args:
        folder: Where.
        words: What follows on `python`.
        send: A signal for it, once it has printed a line.
        data: What it finds on standard input.
        settings: For `start`.
    """
    endings = []
    for process in [start(folder, *words, ours=ours, **settings) for ours in (False, True)]:
        with process:
            if process.stdin is not None and data is not None:
                process.stdin.write(data)
                process.stdin.close()
                process.stdin = None
            if send is not None:
                assert process.stdout is not None
                process.stdout.readline()
                process.send_signal(send)
            endings.append(end(process))
    plain, ours = endings
    for theirs, own in ((plain.out.decode(errors="backslashreplace"), ours.out.decode(errors="backslashreplace")), (plain.err, ours.err)):
        difference = "".join(unified_diff(theirs.splitlines(keepends=True), own.splitlines(keepends=True), "python", "halfstep"))
        assert not difference, difference
    assert (ours.status, ours.out, plain.told) == (plain.status, plain.out, ())
    return ours
