"""A watch as a whole: when it begins and how it ends, what it writes, and that nothing is seen of it."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep import HalfstepWarning, PersistentSkipsError
from halfstep.errors import ConfigurationError, HalfstepError, StepOrderError
from halfstep.journal import Entry, read_run
from halfstep.monitor import AbstractSink
from halfstep.records import Alert
from halfstep.watching.passes import BackwardEvents
from tests.watching.sessions import Session, steps_in, train
from tests.watching.test_restoration import everything

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class TestEnds:
    @pytest.mark.parametrize(
        ("error", "outcome"),
        [(ValueError("no data"), "ValueError"), (KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit(3), "exit status 3")],
        ids=str,
    )
    def test_a_run_that_ends_by_an_exception_is_written_to_its_end(
        self, error: BaseException, outcome: str, tmp_path: Path, untouched: None
    ) -> None:
        session = Session()

        def train() -> None:
            with halfstep.watch(tmp_path, sinks=["jsonl"], command="train.py --epochs 3"):
                for _ in range(5):
                    session.step()
                raise error

        with pytest.raises(type(error)) as seen:
            train()
        assert seen.value is error
        saved = read_run(tmp_path)
        assert len(saved.steps) == 5
        assert [each.outcome for each in saved.ends] == [outcome]
        assert [each.command for each in saved.starts] == ["train.py --epochs 3"]

    def test_in_the_middle_of_a_step(self, tmp_path: Path, untouched: None) -> None:
        """A window is open then, and a region entered."""
        session = Session()

        def train() -> None:
            with halfstep.watch(tmp_path, sinks=["jsonl"]):
                session.step()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = session.model(session.x).float().mean()
                session.scaler.scale(loss).backward()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    raise KeyError("batch")

        with pytest.raises(KeyError, match="batch"):
            train()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not torch.is_autocast_enabled("cpu")
        assert len(steps_in(tmp_path)) == 1

    def test_what_was_not_updated_is_told_at_the_end_of_a_run_alone(self, tmp_path: Path) -> None:
        def train() -> None:
            session = Session()
            session.scaler.scale(session.model(session.x).mean()).backward()
            session.scaler.step(session.optimizer)

        with halfstep.watch(tmp_path / "finished", sinks=()) as finished:
            train()
        assert [each.rule for each in finished.alerts] == ["missing_update"]
        with suppress(KeyboardInterrupt), halfstep.watch(tmp_path / "interrupted", sinks=()) as interrupted:
            train()
            raise KeyboardInterrupt
        assert interrupted.alerts == ()

    def test_a_watch_is_entered_once(self, tmp_path: Path, untouched: None) -> None:
        watch = halfstep.watch(tmp_path, sinks=())
        with watch, pytest.raises(StepOrderError, match=r"was entered before.*halfstep\.watch\(\.\.\.\)"), watch:
            raise AssertionError
        with pytest.raises(StepOrderError, match="was entered before"), watch:
            raise AssertionError

    def test_a_log_that_cannot_be_made_is_refused_before_anything_is_touched(self, tmp_path: Path, untouched: None) -> None:
        file = tmp_path / "file"
        file.write_text("no folder")
        with pytest.raises(ConfigurationError, match="file"), halfstep.watch(file, sinks=["jsonl"]):
            raise AssertionError

    def test_a_log_that_cannot_be_written_ends_and_the_training_goes_on(self, tmp_path: Path, untouched: None) -> None:
        class Full(AbstractSink):
            def write(self, entries: Sequence[Entry]) -> None:
                raise OSError("No space left on device")

            def close(self) -> None: ...

        with pytest.warns(HalfstepWarning, match="Full failed.*No space left"):
            seen = train(tmp_path, 70, sinks=[Full()])
        assert seen.summary().startswith("70 steps")

    def test_a_watch_that_fails_closes_its_log_and_the_loop_goes_on(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        failures: list[Exception],
        untouched: None,
    ) -> None:
        session, begin = Session(), BackwardEvents.begin

        def fail(self: BackwardEvents, *arguments: Any) -> Any:
            if self._scene.steps == 3:
                raise LookupError("a fault of its own")
            return begin(self, *arguments)

        monkeypatch.setattr(BackwardEvents, "begin", fail)
        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            for _ in range(8):
                session.step()
        saved = read_run(tmp_path)
        assert len(saved.steps) == 3
        assert [each.outcome for each in saved.ends] == ["finished"]
        assert "the training is not watched any longer, since LookupError: a fault of its own" in capsys.readouterr().err
        assert [str(each) for each in failures] == ["a fault of its own"]
        failures.clear()

    def test_skips_that_are_read_at_the_end_leave_nothing_behind(self, tmp_path: Path, untouched: None) -> None:
        """They are enough to look into a step, and there is none any more."""
        train(tmp_path, 5, scale=2.0**100, diagnose=True)
        assert read_run(tmp_path).steps.skipped.all()

    def test_an_exception_of_on_alert_at_the_end_leaves_a_whole_log(self, tmp_path: Path, untouched: None) -> None:
        def refuse(alert: Alert) -> None:
            raise ValueError(alert.rule)

        with pytest.raises(ValueError, match="persistent_skips"):
            train(tmp_path, 12, scale=2.0**100, on_alert=refuse)
        saved = read_run(tmp_path)
        assert [each.outcome for each in saved.ends] == ["ValueError"]
        assert len(saved.steps) == 12

    def test_the_exception_that_ended_the_run_is_the_one_that_is_seen(self, tmp_path: Path) -> None:
        def refuse(alert: Alert) -> None:
            raise ValueError(alert.rule)

        with pytest.raises(KeyError, match="batch"):
            train(tmp_path, 12, scale=2.0**100, on_alert=refuse, error=KeyError("batch"))

    def test_an_exception_of_on_alert_in_the_loop_ends_the_run(self, tmp_path: Path, untouched: None) -> None:
        def refuse(alert: Alert) -> None:
            raise ValueError(alert.rule)

        session = Session()

        def train() -> None:
            with halfstep.watch(tmp_path, sinks=["jsonl"], on_alert=refuse):
                session.step()
                session.clip_wrongly()

        with pytest.raises(ValueError, match="clip_before_unscale"):
            train()
        assert [each.outcome for each in read_run(tmp_path).ends] == ["ValueError"]
        session.step()


class TestFolders:
    def test_a_folder_is_made_for_the_script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["src/fit.py", "--epochs", "3 4"])
        with halfstep.watch(sinks=["jsonl"]) as seen:
            Session().step()
        assert seen.log_dir is not None
        assert re.fullmatch(r"halfstep-runs/fit-\d{8}-\d{6}", str(seen.log_dir))
        assert [each.command for each in read_run(seen.log_dir).starts] == ["src/fit.py --epochs '3 4'"]
        assert len(steps_in(seen.log_dir)) == 1

    @pytest.mark.parametrize("named", [True, False])
    def test_another_rank_writes_nothing(self, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RANK", "1")
        session = Session()
        with halfstep.watch(tmp_path / "run" if named else None, sinks=["jsonl"]) as seen:
            session.step()
            session.clip_wrongly()
        assert [*tmp_path.iterdir()] == []
        assert [each.rule for each in seen.alerts] == ["clip_before_unscale"]
        assert seen.summary().startswith("2 steps, none skipped, 1 alert.")

    def test_another_rank_ends_as_the_first_one_and_saves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(PersistentSkipsError, match="in a row were skipped"):
            train(tmp_path / "run", 30, scale=2.0**100, on_persistent_skips="save_and_stop")
        assert [*tmp_path.iterdir()] == []


class TestSummaries:
    @pytest.mark.parametrize(
        ("steps", "skips", "alerts", "text"),
        [
            (0, 0, 0, "no step, none skipped, no alert"),
            (1, 0, 0, "1 step, none skipped, no alert"),
            (3, 1, 0, "3 steps, 1 skipped, no alert"),
            (3, 0, 1, "3 steps, none skipped, 1 alert"),
            (1030, 2, 0, "1,030 steps, 2 skipped, no alert"),
        ],
    )
    def test_it_counts(self, steps: int, skips: int, alerts: int, text: str, tmp_path: Path) -> None:
        folder = tmp_path / "my run"
        session = Session()
        session.scaler.set_growth_interval(10_000)
        with halfstep.watch(folder, sinks=(), rules=()) as seen:
            for step in range(steps):
                if steps - step <= alerts:
                    session.clip_wrongly()
                else:
                    session.step(fails=step < skips)
        assert seen.summary() == f"{text}. To look at it: halfstep report '{folder}'"

    def test_before_it_begins_there_is_nothing(self, tmp_path: Path) -> None:
        seen = halfstep.watch(tmp_path / "run", sinks=())
        seen.flush()
        assert seen.alerts == ()
        assert seen.summary().startswith("no step, none skipped, no alert. ")
        assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_that_is_forked_lets_go(tmp_path: Path) -> None:
    session = Session()
    with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
        session.step()
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                session.step()
                session.clip_wrongly()
                seen.flush()
                counted = seen.summary().startswith("1 step, ")  # That of before.
                seen.__exit__(None, None, None)
                status = 0 if counted and (seen.alerts, everything()["torch.autocast"]) == ((), AUTOCAST) else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.step()
    saved = read_run(tmp_path)
    assert saved.steps.step.tolist() == [1, 2]
    assert [each.outcome for each in saved.ends] == ["finished"]
    assert (saved.alerts, saved.notes) == ((), ())


AUTOCAST = everything()["torch.autocast"]


def test_a_value_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HalfstepError, match="There is no sink 'json'"), halfstep.watch(tmp_path, sinks=["json"]):
        raise AssertionError
