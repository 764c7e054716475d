"""Runs that are killed at a moment that they do not choose, and gone on with. A process of its own, since it forks.

python -m tests.checkpoint.kills FOLDER COUNT
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from halfstep.archive import verify
from halfstep.checkpoint import Checkpointer
from halfstep.errors import HalfstepWarning
from halfstep.randomness import RandomState, seed_everything
from tests.checkpoint.cases import build
from tests.checkpoint.runs import Run, state

_KEPT = 2


class Course:
    """The states of the run that nobody stops."""

    def __init__(self) -> None:
        seed_everything(0)
        self._run = build("fp16, accumulated")()
        self._states: list[dict[str, str]] = [state(self._run)]
        self._random = RandomState.capture()

    def after(self, step: int) -> dict[str, str]:
        """The state after so many steps."""
        self._random.restore()
        while len(self._states) <= step:
            self._run.step(len(self._states) - 1)
            self._states.append(state(self._run))
        self._random = RandomState.capture()
        return self._states[step]


def begin(folder: Path, *, background: bool) -> tuple[Run, Checkpointer, int]:
    """A run that goes on from where the one before it was killed."""
    run = build("fp16, accumulated")()
    checkpointer = Checkpointer(folder, amp=run.engines, keep=_KEPT, background=background)
    info = checkpointer.resume()
    return run, checkpointer, info.step if info else 0


def train_for_ever(folder: Path, pipe: int, *, background: bool) -> None:
    """Trains, and says of each step that it was taken and saved."""
    run, checkpointer, step = begin(folder, background=background)
    while True:
        run.step(step)
        step += 1
        checkpointer.save(step)
        os.write(pipe, step.to_bytes(4, "little"))


def kill_one(folder: Path, after_s: float, *, background: bool, seed: int) -> int:
    """Kills a run so many seconds after its first step; returns the last step that it spoke of."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # At the very beginning it draws what all draw; later on these seeds are replaced by what was saved.
            seed_everything(seed)
            train_for_ever(folder, writer, background=background)
        finally:
            os._exit(1)
    os.close(writer)
    select.select([reader], [], [], 30.0)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = b""
    while part := os.read(reader, 1 << 16):
        told += part
    os.close(reader)
    assert len(told) >= 4, "it has failed"
    return int.from_bytes(told[len(told) // 4 * 4 - 4 : len(told) // 4 * 4], "little")


def check(folder: Path, course: Course, *, told: int, background: bool) -> int:
    """Goes on from what a killed run has left; returns how many half-written files it had left, too."""
    left = [path for path in folder.iterdir() if path.name.endswith(".part")]
    run, checkpointer, step = begin(folder, background=False)
    assert told - background <= step <= told + 1, (told, step, background)
    reached = state(run)
    assert reached == course.after(step), step
    whole = checkpointer.checkpoints()
    assert sorted(folder.iterdir()) == sorted(whole), "something is left"
    assert 1 <= len(whole) <= _KEPT + 1
    assert all(verify(path).step == step - behind for behind, path in enumerate(whole))
    return len(left)


def main() -> None:
    """Kills so many runs, each of which goes on from the one before."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "fp16 on this CPU is emulated", HalfstepWarning)
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    course = Course()
    left = 0
    gc.collect()
    gc.freeze()  # Or each child would look through all that was imported, and copy it for that.
    for number in range(count):
        background = number % 2 == 1
        told = kill_one(folder, moments.uniform(0.0, 0.1), background=background, seed=number)
        left += check(folder, course, told=told, background=background)
    print(f"{count} killed, {left} of them while they wrote")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
