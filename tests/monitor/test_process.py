"""What is recorded of the process."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

import halfstep
from halfstep.monitor.process import outcome_of, process_rank, run_record, time_now


def test_the_time_is_utc_to_the_second() -> None:
    time = datetime.fromisoformat(time_now())
    assert time.utcoffset() == timedelta(0)
    assert time.microsecond == 0


@pytest.mark.parametrize(("text", "rank"), [(None, 0), ("", 0), ("3", 3), ("-1", 0), ("first", 0)])
def test_the_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch, text: str | None, rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    record = run_record("started", time="now", command="train.py")
    assert process_rank() == record.rank == rank
    assert record.world_size == (3 if text == "3" else 1)


def cuda(*, initialized: bool, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        is_initialized=lambda: initialized, is_available=lambda: available, get_device_name=lambda: "NVIDIA H200" if initialized else 1 / 0
    )


@pytest.mark.parametrize(
    ("torch", "version", "device"),
    [
        (None, None, ""),
        (SimpleNamespace(), None, ""),
        (SimpleNamespace(__version__="2.13.0", cuda=cuda(initialized=True, available=True)), "2.13.0", "NVIDIA H200"),
        (SimpleNamespace(__version__="2.13.0", cuda=cuda(initialized=False, available=True)), "2.13.0", ""),
        (SimpleNamespace(__version__="2.13.0", cuda=cuda(initialized=False, available=False)), "2.13.0", "CPU"),
    ],
)
def test_torch_is_asked_what_it_knows_and_not_started(
    monkeypatch: pytest.MonkeyPatch, torch: object, version: str | None, device: str
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if torch is not None:
        monkeypatch.setitem(sys.modules, "torch", torch)
    record = run_record("ended", time="now", command="train.py --lr 0.1", outcome="finished")
    assert (record.torch, record.device) == (version, device)
    assert (record.event, record.time, record.command, record.outcome) == ("ended", "now", "train.py --lr 0.1", "finished")
    assert record.halfstep == halfstep.__version__
    assert ("torch" in sys.modules) == (torch is not None)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("x"), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(), "exit status 0"),
        (SystemExit(0), "exit status 0"),
        (SystemExit(3), "exit status 3"),
        (SystemExit("no data"), "exit status 1"),
    ],
)
def test_how_an_exception_ends_a_run(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome
