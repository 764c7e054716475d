"""Records in; lines, alerts and actions out."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.journal import Entry, read_run
from halfstep.monitor import AbstractSink, Monitor
from halfstep.records import Action, Alert, RunRecord, Site, StepRecord
from tests.monitor.toy_rules import AtEnd, EachSkip, SkipsInARow, step

ALERT = Alert(rule="clip_before_unscale", step=2, message="Clipped.", advice="", site=None, severity="error")
ACTION = Action(rule="each_skip", step=2, action="fall_back", message="The run goes on in bf16.")


@final
class Kept(AbstractSink):
    """Keeps what it is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Entry]] = []
        self.is_closed = False

    def write(self, entries: Sequence[Entry]) -> None:
        assert not self.is_closed
        self.calls.append([*entries])

    def close(self) -> None:
        self.is_closed = True

    def kinds(self) -> list[list[Any]]:
        """Steps as their numbers, other entries as their classes, without the start of the run."""
        calls = [[each for each in call if not isinstance(each, RunRecord)] for call in self.calls]
        return [[each.step if isinstance(each, StepRecord) else type(each) for each in call] for call in calls]


@final
class Broken(AbstractSink):
    """Fails on the second call."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, entries: Sequence[Entry]) -> None:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("the server is gone")

    def close(self) -> None:
        raise AssertionError("it is given nothing more")


def monitor(sink: AbstractSink, **changes: Any) -> Monitor:
    values: dict[str, Any] = {"sinks": [sink], "rules": [EachSkip()], "flush_steps": 4, "flush_seconds": 1e9}
    return Monitor("no/such/folder", **(values | changes))


def test_records_wait_until_there_are_enough() -> None:
    watcher = monitor(sink := Kept())
    for number in range(1, 10):
        watcher.observe(step(number))
    assert sink.kinds() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    watcher.flush()
    watcher.flush()
    assert sink.kinds() == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    watcher.close()


def test_records_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watcher = monitor(sink := Kept(), flush_steps=100, flush_seconds=2.0)
    for number, now[0] in ((1, 101.9), (2, 102.0), (3, 103.9), (4, 104.5), (5, 104.6)):
        watcher.observe(step(number))
    assert sink.kinds() == [[1, 2], [3, 4]]
    watcher.close()


class Reader:
    """Reads all values of an engine's steps at once, as a device does."""

    def __init__(self) -> None:
        self.transfers = 0
        self.losses: dict[int, float] = {}
        self.read_up_to = 0

    def record(self, number: int) -> StepRecord:
        self.losses[number] = number / 8

        def read() -> Mapping[str, Any]:
            if number > self.read_up_to:
                self.transfers += 1
                self.read_up_to = max(self.losses)
            return {"loss": self.losses[number], "skipped": number == 3, "grad_norm": None}

        known = {"step": number, "scale": 1.0, "lr": 0.1, "step_time_s": 0.01, "memory_bytes": None, "precision": "fp16"}
        return StepRecord.deferred(read, **known)


def test_values_on_a_device_are_read_once_a_flush() -> None:
    reader = Reader()
    watcher = monitor(sink := Kept(), flush_steps=5)
    for number in range(1, 5):
        watcher.observe(reader.record(number), epoch=2)
        assert reader.transfers == 0
    watcher.observe(reader.record(5))
    assert reader.transfers == 1
    watcher.observe(reader.record(6), epoch=3)
    watcher.close()
    assert reader.transfers == 2
    records = [each for call in sink.calls for each in call if isinstance(each, StepRecord)]
    assert [(each.loss, each.epoch) for each in records] == [(0.125, 2), (0.25, 2), (0.375, 2), (0.5, 2), (0.625, None), (0.75, 3)]
    assert [alert.step for alert in watcher.alerts] == [3]


def test_an_epoch_beside_a_record_is_the_records() -> None:
    watcher = monitor(sink := Kept(), flush_steps=3)
    watcher.observe(step(1, epoch=1), epoch=4)
    watcher.observe(step(2, epoch=1, skipped=True))
    watcher.observe(step(3, skipped=True), epoch=5)
    assert [each.epoch for each in sink.calls[0] if isinstance(each, StepRecord)] == [4, 1, 5]
    assert ["epoch 1" in alert.message or "epoch 5" in alert.message for alert in watcher.alerts] == [True, True]
    watcher.close()


def test_an_alert_stands_after_its_step_and_all_is_in_order() -> None:
    watcher = monitor(sink := Kept(), flush_steps=100)
    watcher.observe(step(1))
    watcher.observe(step(2, skipped=True))
    watcher.observe(step(3))
    watcher.note(ACTION)
    watcher.observe(step(4))
    assert sink.calls == []
    watcher.report(ALERT)
    assert sink.kinds() == [[1, 2, Alert, 3, Action, 4, Alert]]
    watcher.close()
    assert [alert.rule for alert in watcher.alerts] == ["each_skip", "clip_before_unscale"]


def test_the_file_begins_and_ends_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["my train.py", "--lr", "0.1"])
    with Monitor(tmp_path / "new", sinks=["jsonl"], rules=[]) as watcher:
        watcher.observe(step(1))
    with Monitor(tmp_path / "new", sinks=["jsonl"], rules=[], command="resumed"):
        pass
    lines = [json.loads(line) for line in (tmp_path / "new" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line.get("event")) for line in lines] == [
        ("run", "started"),
        ("step", None),
        *[("run", "ended"), ("run", "started"), ("run", "ended")],
    ]
    assert [line["command"] for line in lines if line["kind"] == "run"] == [shlex.join(sys.argv)] * 2 + ["resumed"] * 2
    assert watcher.log_dir == tmp_path / "new"
    assert read_run(watcher.log_dir).ended == (True, True)


@pytest.mark.parametrize(("error", "outcome"), [(ValueError("x"), "ValueError"), (SystemExit(3), "exit status 3")])
def test_an_exception_is_the_outcome_and_goes_on(tmp_path: Path, error: BaseException, outcome: str) -> None:
    kept = Kept()

    def stop(alert: Alert) -> None:
        raise SystemExit(f"a second error: {alert}")

    def train() -> None:
        with Monitor(tmp_path, sinks=["jsonl", kept], rules=[EachSkip()], actions={"each_skip": stop}) as watcher:
            watcher.observe(step(1, skipped=True))
            raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert kept.is_closed
    saved = read_run(tmp_path)
    assert (len(saved.steps), len(saved.alerts), len(saved.actions), saved.ends[0].outcome) == (1, 1, 1, outcome)


def test_an_action_that_raises_does_so_once_all_is_written() -> None:
    def fail(alert: Alert) -> None:
        raise KeyError(alert.step)

    watcher = monitor(sink := Kept(), rules=[EachSkip(), AtEnd()], actions={"each_skip": fail, "at_end": fail})
    for number in range(1, 4):
        watcher.observe(step(number, skipped=number < 3))
    with pytest.raises(KeyError, match="1"):
        watcher.observe(step(4))
    assert sink.kinds() == [[1, Alert], [Action, 2, Alert], [Action, 3, Alert], [Action, 4]]
    assert [each.message for call in sink.calls for each in call if isinstance(each, Action)] == [
        *("KeyError was raised: 1", "KeyError was raised: 2", "KeyError was raised: 3")
    ]
    watcher.flush()
    with pytest.raises(KeyError, match="4"):
        watcher.close()
    last = sink.calls[-1][-1]
    assert isinstance(last, RunRecord)
    assert (last.event, last.outcome) == ("ended", "KeyError")
    assert sink.is_closed


def test_an_action_is_called_once_its_alert_is_written() -> None:
    sink = Kept()
    seen: list[Any] = []

    def fall_back(alert: Alert) -> Action:
        seen.append((alert.step, sink.kinds()))
        return ACTION

    watcher = monitor(sink, actions={"each_skip": fall_back, "another": fall_back}, on_alert=seen.append)
    for number in range(1, 5):
        watcher.observe(step(number, skipped=number == 2))
    assert seen == [watcher.alerts[0], (2, [[1, 2, Alert]])]
    assert sink.kinds() == [[1, 2, Alert], [Action, 3, 4]]
    watcher.close()


def test_an_action_may_observe_note_and_report() -> None:
    def answer(alert: Alert) -> None:
        watcher.note(ACTION)
        watcher.report(ALERT)
        watcher.flush()
        watcher.observe(step(9))
        raise SystemExit(3)

    watcher = monitor(sink := Kept(), actions={"each_skip": answer})
    watcher.observe(step(1, skipped=True))
    watcher.observe(step(2))
    with pytest.raises(SystemExit, match="3"):
        watcher.flush()
    # It noted what it did, so nothing is added to that.
    assert sink.kinds() == [[1, Alert], [2, Action, Alert, 9]]
    assert len(watcher.alerts) == 2
    watcher.close()


def test_an_interruption_loses_no_record() -> None:
    def locate(alert: Alert) -> Site | None:
        raise KeyboardInterrupt

    watcher = monitor(sink := Kept(), locate=locate)
    watcher.observe(step(1, skipped=True))
    watcher.observe(step(2))
    with pytest.raises(KeyboardInterrupt):
        watcher.flush()
    watcher.close("KeyboardInterrupt")
    assert sink.kinds() == [[1], [2], []]


def test_alerts_of_rules_are_located_and_those_from_code_are_not() -> None:
    site = Site(module="unknown", file="train.py", line=3)
    watcher = monitor(Kept(), rules=[EachSkip(), AtEnd()], locate=lambda alert: None if alert.step == 2 else site)
    for number in (1, 2):
        watcher.observe(step(number, skipped=True))
    watcher.observe(step(5))
    watcher.report(ALERT)
    watcher.close()
    assert [alert.site for alert in watcher.alerts] == [site, None, None, site]


def test_a_sink_that_fails_is_dropped_and_the_others_are_not() -> None:
    watcher = monitor(Kept(), sinks=[broken := Broken(), kept := Kept()], flush_steps=1)
    watcher.observe(step(1))
    with pytest.warns(HalfstepWarning, match=r"^Broken failed, and is given nothing more: ValueError: the server is gone$"):
        watcher.observe(step(2))
    watcher.observe(step(3))
    watcher.close()
    assert broken.calls == 2
    assert kept.kinds() == [[1], [2], [3], []]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    watcher = Monitor(tmp_path, sinks=["jsonl"], rules=[EachSkip()], flush_steps=1)
    with pytest.warns(HalfstepWarning, match="No space left on device") as caught:
        watcher.observe(step(1, skipped=True))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher.observe(step(2, skipped=True))
        watcher.close()
    assert [alert.step for alert in watcher.alerts] == [1, 2]


def test_another_rank_judges_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    seen: list[Alert] = []
    with Monitor(tmp_path / "new", sinks=["jsonl", "console", kept := Kept()], rules=[SkipsInARow()], on_alert=seen.append) as watcher:
        for number in (1, 2):
            watcher.observe(step(number, skipped=True))
    assert len(seen) == 1
    assert watcher.alerts == tuple(seen)
    assert kept.calls == []
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_nothing(tmp_path: Path) -> None:
    watcher = Monitor(tmp_path, sinks=["jsonl"], rules=[EachSkip()])
    watcher.observe(step(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            watcher.observe(step(2, skipped=True))
            watcher.report(ALERT)
            watcher.note(ACTION)
            watcher.flush()
            watcher.close()
            status = 0 if watcher.alerts == () else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "run.jsonl").read_bytes() == b""
    watcher.close()
    saved = read_run(tmp_path)
    assert (saved.steps.step.tolist(), saved.alerts, saved.actions, len(saved.ends)) == ([1], (), (), 1)


def test_what_waits_is_written_when_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    watcher = monitor(sink := Kept())
    watcher.observe(step(1))
    for call in at_exit:
        call()
    assert sink.kinds() == [[1]]
    watcher.close()
    assert at_exit == []


def test_after_close_nothing_is_taken() -> None:
    watcher = monitor(sink := Kept())
    watcher.close("exit status 2")
    calls = len(sink.calls)
    for _ in range(2):
        watcher.observe(step(1, skipped=True))
        watcher.report(ALERT)
        watcher.note(ACTION)
        watcher.flush()
        watcher.close()
    assert len(sink.calls) == calls
    assert watcher.alerts == ()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"sinks": ["json"]}, ConfigurationError, r"^There is no sink 'json'\. Did you mean 'jsonl'\? Allowed are jsonl, csv, tensorboard"),
        ({"sinks": "jsonl"}, InvalidTypeError, r"^sinks is the text 'jsonl'\. Pass several names, such as \['jsonl'\]\."),
        ({"sinks": [3]}, InvalidTypeError, "^sinks holds 3, which is neither a name nor an AbstractSink"),
        ({"rules": [3]}, InvalidTypeError, "^rules holds 3, which is no rule"),
        ({"flush_steps": 0}, ConfigurationError, "^flush_steps=0: allowed is a whole number from 1"),
        ({"flush_seconds": -1}, ConfigurationError, "^flush_seconds=-1: allowed is a number from 0"),
        ({"flush_seconds": float("nan")}, ConfigurationError, "^flush_seconds=nan: allowed is a number from 0"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(error, match=match):
            Monitor(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()
