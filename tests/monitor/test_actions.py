"""Built-in answers to alerts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.errors import HalfstepWarning, PersistentSkipsError
from halfstep.journal import read_run
from halfstep.monitor import Monitor
from halfstep.monitor.actions import stop, warn
from halfstep.records import Action
from tests.monitor.toy_rules import EachSkip, step


def test_a_warning_goes_on_and_is_recorded(tmp_path: Path) -> None:
    with Monitor(tmp_path, sinks=["jsonl"], rules=[EachSkip()], actions={"each_skip": warn}) as monitor:
        monitor.observe(step(1, skipped=True))
        with pytest.warns(HalfstepWarning, match=re.escape("each_skip at step 1: : step 1 was skipped")):
            monitor.flush()
        monitor.observe(step(2))
    saved = read_run(tmp_path)
    assert saved.actions == (Action(rule="each_skip", step=1, action="warn", message="A warning was shown."),)
    assert len(saved.steps) == 2
    assert saved.ends[0].outcome == "finished"


def test_a_stop_is_recorded_before_it_is_raised(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, sinks=["jsonl"], rules=[EachSkip()], actions={"each_skip": stop})
    for number in range(1, 4):
        monitor.observe(step(number, skipped=number == 2))
    with pytest.raises(PersistentSkipsError, match=r"^each_skip at step 2: : step 2 was skipped.* Wait\.$") as caught:
        monitor.flush()
    saved = read_run(tmp_path)
    assert len(saved.steps) == 3
    assert saved.actions == (Action(rule="each_skip", step=2, action="raise", message=f"PersistentSkipsError was raised: {caught.value}"),)
    monitor.close("PersistentSkipsError")
    assert read_run(tmp_path).ends[0].outcome == "PersistentSkipsError"
