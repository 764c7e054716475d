"""Runs a function on several ranks, for tests of what they do together."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

__all__ = ["run_ranks"]

# A server that has loaded torch once forks the ranks in a moment; a forked copy of the test process itself could inherit held locks.
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor"]


def run_ranks(function: Callable[..., Any], *args: Any, tmp_path: Path, size: int = 2, timeout_s: float = 120) -> list[Any]:
    """Calls `function(rank, *args)` in one process for each rank, all in one gloo process group, and returns what they return.

    The first start takes some seconds, later ones are quick. When a rank raises, or one is still running after the time limit, the others
    are ended and the test fails with the traceback of each.

    Args:
        function: A function of a module's top level, which the processes import. What it returns must be picklable.
        args: More arguments for it, picklable.
        tmp_path: A folder in which the processes meet.
        size: The number of ranks.
        timeout_s: The time limit in seconds for all of them together.
    """
    folder = tmp_path / uuid4().hex
    folder.mkdir()
    context: Any = multiprocessing.get_context(START)  # typed as one that starts nothing
    if START == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(rank, size, folder, timeout_s, function, args), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        finished = _wait(processes, folder=folder, seconds=timeout_s)
        unfinished = _unfinished(processes, seconds=timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    failures = [text for rank in range(size) if (text := _failure(folder / f"{rank}.error", rank=rank))]
    if failures or not finished:
        pytest.fail("\n".join([*([] if finished else [unfinished]), *failures]), pytrace=False)
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(size)]


def _wait(processes: list[BaseProcess], *, folder: Path, seconds: float) -> bool:
    """Waits until all ranks are done, or one has failed: then the others may wait for it for ever. Whether each left its result."""
    end = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            # One that fails as a consequence says so within a moment; the first error is what counts.
            for process in processes:
                process.join(1)
            break
        time.sleep(0.01)
    if time.monotonic() >= end:
        time.sleep(1)  # for the processes to write where they stand
    return all((folder / f"{rank}.result").exists() for rank in range(len(processes)))


def _unfinished(processes: list[BaseProcess], *, seconds: float) -> str:
    died = [f"Rank {rank} died, with exit code {process.exitcode}." for rank, process in enumerate(processes) if process.exitcode]
    return "\n".join(died or [f"After {seconds} s the ranks were still running."])


def _failure(path: Path, *, rank: int) -> str:
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return f"Rank {rank}:\n{text}\n" if text else ""


def _run(rank: int, size: int, folder: Path, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch  # noqa: PLC0415 - the test process need not load it to start the ranks
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A process group that is collected in the middle of something, or left for the end of the interpreter, ends the process: gloo's threads
    # outlive it ("terminate called without an active exception"). So all are collected here, while everything is still there.
    gc.disable()
    with (folder / f"{rank}.error").open("w", encoding="utf-8") as errors:
        faulthandler.dump_traceback_later(timeout_s, file=errors)
        try:
            # Its own time limit comes after the test's, so that a deadlock is reported with where each rank stands.
            patience = timedelta(seconds=2 * timeout_s + 10)
            dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size, timeout=patience)
            result = function(rank, *args)
            # The first to leave would cut off a rank that is still in a collective operation.
            dist.barrier()
            gc.collect()
            dist.destroy_process_group()
            (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        except BaseException:
            traceback.print_exc(file=errors)
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
