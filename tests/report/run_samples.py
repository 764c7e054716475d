"""Runs for tests of reports, written and read back by the journal."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.journal import Entry, RunWriter, SavedRun, read_run
from halfstep.records import Action, Alert, RunRecord, Site, StepRecord
from halfstep.report.runs import ReportedRun, reported_runs

ATTACK = "</script><img src=x onerror=alert(1)>"


def step(number: int, **changes: Any) -> StepRecord:
    """A healthy step in fp16."""
    values: dict[str, Any] = {
        "step": number,
        "skipped": False,
        "scale": 1024.0,
        "loss": 2.0 / number,
        "grad_norm": 0.5,
        "lr": 0.1,
        "step_time_s": 0.04,
        "memory_bytes": 3 * 2**30,
        "precision": "fp16",
        "scaler": "used",
    }
    return StepRecord(**(values | changes))


def steps(count: int, *, first: int = 1, **changes: Any) -> list[StepRecord]:
    """Healthy steps, one after the other."""
    return [step(number, **changes) for number in range(first, first + count)]


def start(**changes: Any) -> RunRecord:
    """The start of a run, at noon."""
    values: dict[str, Any] = {
        "event": "started",
        "time": "2026-01-31T12:00:00+00:00",
        "command": "train.py --epochs 3",
        "halfstep": "0.1.0",
        "torch": "2.13.0",
        "device": "NVIDIA H200",
        "rank": 0,
        "world_size": 1,
    }
    return RunRecord(**(values | changes))


def end(**changes: Any) -> RunRecord:
    """The end of a run, an hour and a half later."""
    return start(**({"event": "ended", "time": "2026-01-31T13:30:00+00:00", "outcome": "finished"} | changes))


def alert(rule: str = "loss_spike", at: int = 2, **changes: Any) -> Alert:
    """A warning."""
    values: dict[str, Any] = {
        "rule": rule,
        "step": at,
        "message": "The loss rose from 0.5 to 987. What was learned may be lost.",
        "advice": "Clip gradients.",
        "site": None,
        "severity": "warning",
    }
    return Alert(**(values | changes))


def action(**changes: Any) -> Action:
    """A fall-back."""
    values: dict[str, Any] = {"rule": "persistent_skips", "step": 2, "action": "fall_back", "message": "The run goes on in bf16."}
    return Action(**(values | changes))


def site(**changes: Any) -> Site:
    """A line of a user's script."""
    values: dict[str, Any] = {"module": "", "file": "train.py", "line": 57}
    return Site(**(values | changes))


def saved(entries: Iterable[Entry], *, name: str = "digits", folder: Path | None = None) -> SavedRun:
    """The run that consists of these entries."""
    with tempfile.TemporaryDirectory() as scratch:
        writer = RunWriter(Path(folder or scratch, name))
        writer.write(entries)
        writer.close()
        return read_run(writer.path.parent)


def reported(*entries: Entry, name: str = "digits") -> ReportedRun:
    """A run in a report of its own."""
    (run,) = reported_runs([saved(entries, name=name)])
    return run


def complete(count: int = 40, **changes: Any) -> list[Entry]:
    """A whole run, from its start to its end."""
    return [start(), *steps(count, **changes), end()]


def hostile() -> list[Entry]:
    """A run in which every text tries to break out of the page."""
    return [
        start(command=ATTACK, device=ATTACK),
        *steps(3, optimizer=ATTACK),
        alert(ATTACK, message=ATTACK, advice=ATTACK, site=site(module=ATTACK, file=ATTACK)),
        action(rule=ATTACK, action=ATTACK, message=ATTACK),
        end(outcome=ATTACK),
    ]
