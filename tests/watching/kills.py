"""Runs that are killed at a moment that they do not choose. A process of its own, since it forks and torch must have no threads by then.

python -m tests.watching.kills FOLDER COUNT
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import halfstep
from halfstep.journal import read_run


def train_for_ever(folder: Path, pipe: int) -> None:
    """Trains in a watch, and says after each flush how many steps are behind it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 4)
    with halfstep.watch(folder, sinks=["jsonl", "csv"]) as seen:
        step = 0
        while True:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                seen.flush()
                os.write(pipe, step.to_bytes(4, "little"))


def kill_one(folder: Path, after_s: float) -> tuple[int, int]:
    """Kills a run so many seconds after it began to flush; returns the steps that it had flushed for certain, and those in its log."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train_for_ever(folder, writer)
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
    flushed = int.from_bytes(told[len(told) // 4 * 4 - 4 : len(told) // 4 * 4], "little")
    saved = read_run(folder)
    steps = saved.steps.step.tolist()
    assert steps == list(range(1, len(steps) + 1)), steps[-5:]
    assert not saved.ends
    return flushed, len(steps)


def main() -> None:
    """Kills so many runs, one after the other."""
    torch.set_num_threads(1)
    gc.freeze()  # Or each child would look through all that was imported, and copy it for that.
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    lost = 0
    for number in range(count):
        folder = root / str(number)
        flushed, logged = kill_one(folder, moments.uniform(0.0, 0.03))
        lost += flushed > logged
    # A killed run may go on in the same folder, behind a line that was torn.
    with (root / "0" / "run.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 7, "sk')
    flushed, logged = kill_one_more(root / "0")
    sys.stdout.write(f"{count} killed, {lost} lost something, resumed {flushed <= logged}\n")


def kill_one_more(folder: Path) -> tuple[int, int]:
    """Resumes a run in a folder whose last line is torn; returns its steps before, and those of the log after."""
    before = len(read_run(folder).steps)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with halfstep.watch(folder, sinks=["jsonl"]):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    saved = read_run(folder)
    assert saved.notes, "the torn line goes unmentioned"
    assert len(saved.starts) == 2
    return before + 5, len(saved.steps)


if __name__ == "__main__":
    main()
