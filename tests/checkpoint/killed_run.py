"""A run in a process of its own that can be killed.

python -m tests.checkpoint.killed_run FOLDER foreground|background KILLED_AT
"""

from __future__ import annotations

import sys
import warnings
from hashlib import sha256
from pathlib import Path

import torch

from halfstep.checkpoint import Checkpointer
from halfstep.errors import HalfstepWarning
from halfstep.randomness import seed_everything
from tests.checkpoint.cases import build
from tests.checkpoint.runs import Run, state

__all__ = ["end_of"]

_STEPS = 20


def digest(run: Run) -> str:
    return sha256(repr(sorted(state(run).items())).encode()).hexdigest()


def end_of() -> str:
    """What the run is in the end, when nobody stops it."""
    seed_everything(0)
    run = build("fp16, accumulated")()
    for step in range(_STEPS):
        run.step(step)
    return digest(run)


def main() -> None:
    """Goes on from where the run is; at one step it waits to be killed."""
    folder, background, killed_at = Path(sys.argv[1]), sys.argv[2] == "background", int(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "fp16 on this CPU is emulated", HalfstepWarning)
    seed_everything(0 if killed_at >= 0 else 1)
    run = build("fp16, accumulated")()
    with Checkpointer(folder, amp=run.engines, background=background) as checkpointer:
        info = checkpointer.resume()
        start = info.step if info else 0
        print("begins at", start, flush=True)  # noqa: T201 - the test reads it
        for step in range(start, _STEPS):
            run.step(step)
            checkpointer.save(step + 1)
            if step + 1 == killed_at:
                print("reached", step + 1, flush=True)  # noqa: T201
                sys.stdin.read()
    print("ends as", digest(run))  # noqa: T201


if __name__ == "__main__":
    main()
