"""Many files, checked on all cores."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from halfstep.lint.checking import CheckedFile, RuleBook, check_content
from halfstep.lint.rules.rule import AbstractRule, Safety
from halfstep.lint.source import read_content

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["Job", "check_files"]

# Starting a process takes as long as checking some files.
_FEW: Final = 20
_MOST_AT_ONCE: Final = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file to check.

    Attributes:
        path: The file.
        codes: The codes of the rules that are on for it.
        allowed: Which fixes are made in it.
    """

    path: Path
    codes: frozenset[str]
    allowed: frozenset[Safety] = frozenset()


def check_files(jobs: Sequence[Job], rules: tuple[AbstractRule, ...]) -> Iterator[CheckedFile]:
    """Checks files, several at once where there are many, and yields what came of each in their order. No file is changed.

    Args:
        jobs: The files.
        rules: All rules.

    Raises:
        ChildProcessError: A process that checked files was ended from outside.
    """
    processes = min(_cores(), len(jobs) // _FEW + 1)
    if processes == 1:
        yield from _check_all(jobs, rules)
    else:
        yield from _check_together(jobs, rules, processes)


def _check_together(jobs: Sequence[Job], rules: tuple[AbstractRule, ...], processes: int) -> Iterator[CheckedFile]:
    # They are loaded only for many files: a hook at a commit has few.
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415
    from multiprocessing import get_context  # noqa: PLC0415

    size = max(1, min(_MOST_AT_ONCE, len(jobs) // (processes * 4)))
    pool = ProcessPoolExecutor(processes, mp_context=get_context(_start_method()), initializer=_depend_on_parent)
    try:
        batches = [pool.submit(_check_all, jobs[first : first + size], rules) for first in range(0, len(jobs), size)]
        for batch in batches:
            yield from batch.result()
    except BrokenProcessPool as error:
        raise ChildProcessError("a process that checked files was ended from outside; is there enough memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _check_all(jobs: Sequence[Job], rules: tuple[AbstractRule, ...]) -> list[CheckedFile]:
    with _fewer_collections():
        return [_check(job, rules) for job in jobs]


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Syntax trees are many objects and hold no garbage: looking for some after every few hundred of them costs a tenth of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _check(job: Job, rules: tuple[AbstractRule, ...]) -> CheckedFile:
    try:
        content = read_content(job.path)
    except OSError as error:
        return CheckedFile(path=str(job.path), failures=(f"Cannot read {job.path}: {error.strerror or error}.",))
    return check_content(content, path=str(job.path), book=RuleBook(rules=rules, codes=job.codes), allowed=job.allowed)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_method() -> str:
    """A copy of this process starts at once, but is safe only where no thread holds a lock; torch has some that Python does not see."""
    is_alone = threading.active_count() == 1 and "torch" not in sys.modules
    return "fork" if sys.platform == "linux" and is_alone else "spawn"


def _depend_on_parent() -> None:
    """Makes a process that checks files end with the one that started it, and not before."""
    from multiprocessing import parent_process  # noqa: PLC0415 - it is loaded in such a process

    # Ctrl-C reaches every process of a terminal. The one that started the others ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    # One that was killed cannot end the others: they would wait for work for ever, and keep its standard output open.
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
