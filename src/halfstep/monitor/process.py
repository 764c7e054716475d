"""The process that records a run."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from importlib import import_module
from typing import Any

from halfstep.records import RunEvent, RunRecord

__all__ = ["outcome_of", "process_rank", "run_record", "time_now"]


def time_now() -> str:
    """The time in UTC, as records write it.

    Example:
        >>> len(time_now())
        25
    """
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def process_rank() -> int:
    """The rank of this process among those that train together, as launchers such as torchrun tell it: 0 without one."""
    return _number("RANK", default=0)


def run_record(event: RunEvent, *, time: str, command: str, outcome: str = "") -> RunRecord:
    """That this process began to record a run, or ended.

    Args:
        event: Which of both.
        time: When.
        command: What is run.
        outcome: How it ended.

    Example:
        >>> run_record("ended", time=time_now(), command="train.py", outcome="finished").outcome
        'finished'
    """
    torch = sys.modules.get("torch")  # A run may be recorded without it.
    return RunRecord(
        event=event,
        time=time,
        command=command,
        halfstep=str(import_module("halfstep").__version__),  # The face of the package stands above all layers.
        torch=None if torch is None else str(getattr(torch, "__version__", "")) or None,
        device=_device(torch),
        rank=process_rank(),
        world_size=_number("WORLD_SIZE", default=1),
        outcome=outcome,
    )


def outcome_of(error: BaseException) -> str:
    """How a run ends that an exception ends.

    Example:
        >>> [outcome_of(error) for error in (KeyboardInterrupt(), SystemExit(3), SystemExit("no data"), SystemExit())]
        ['KeyboardInterrupt', 'exit status 3', 'exit status 1', 'exit status 0']
    """
    if not isinstance(error, SystemExit):
        return type(error).__name__
    if error.code is None:
        return "exit status 0"
    return f"exit status {error.code if isinstance(error.code, int) else 1}"


def _device(torch: Any) -> str:
    """The name of the device, as far as torch knows it without being started for that."""
    if torch is None or not hasattr(torch, "cuda"):
        return ""
    if torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return "" if torch.cuda.is_available() else "CPU"


def _number(name: str, *, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
