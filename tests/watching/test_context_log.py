"""What a watch writes, and when it reads what lies on a device."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import MixedPrecision
from halfstep.journal import read_run
from halfstep.records import Alert
from tests.watching.data import regression
from tests.watching.sessions import Session, steps_in

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class TestLog:
    def test_alerts_are_handed_over_and_written_after_the_steps_before_them(self, tmp_path: Path) -> None:
        heard: list[Alert] = []
        session = Session()
        with halfstep.watch(tmp_path, sinks=["jsonl"], on_alert=heard.append) as seen:
            for _ in range(3):
                session.step()
            session.clip_wrongly()
            session.clip_wrongly()
        assert [(each.rule, each.step) for each in heard] == [("clip_before_unscale", 4)]
        assert seen.alerts == tuple(heard) == read_run(tmp_path).alerts
        lines = [json.loads(each) for each in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert [(each["kind"], each.get("step")) for each in lines] == [
            ("run", None), ("step", 1), ("step", 2), ("step", 3), ("alert", 4), ("step", 4), ("step", 5), ("run", None),
        ]  # fmt: skip

    def test_two_runs_in_one_folder_are_two_segments(self, tmp_path: Path) -> None:
        for _ in range(2):
            session = Session()
            with halfstep.watch(tmp_path, sinks=["jsonl"]):
                session.step()
                session.step()
        saved = read_run(tmp_path)
        assert (saved.segments, saved.ended, saved.steps.step.tolist()) == ((0, 2), (True, True), [1, 2, 1, 2])

    def test_steps_are_written_when_many_wait_or_time_has_passed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr("halfstep.watching.context.time.monotonic", lambda: now[0])
        session = Session()
        with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:

            def written() -> int:
                return (tmp_path / "run.jsonl").read_text().count('"step_time_s"') if (tmp_path / "run.jsonl").exists() else 0

            for _ in range(63):
                session.step()
            assert written() == 0
            session.step()
            assert written() == 64
            session.step()
            now[0] += 2.5
            session.step()
            assert written() == 66
            session.step()
            seen.flush()
            assert written() == 67
            seen.flush()
        assert len(steps_in(tmp_path)) == 67

    def test_the_steps_of_an_engine_are_there_once(self, tmp_path: Path) -> None:
        other = Session()
        with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
            model = nn.Linear(4, 1)
            amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), "fp16", max_grad_norm=1.0)
            records = []
            for _ in range(50):
                records.append(amp.train_step(lambda x, y: F.mse_loss(model(x), y), other.x, other.y))
                other.step()
        saved = steps_in(tmp_path)
        assert saved[::2] == records
        assert [each.step for each in saved[1::2]] == [*range(1, 51)]
        assert seen.alerts == ()

    def test_the_steps_of_one_engine_after_another_are_there_once(self, tmp_path: Path) -> None:
        data = regression(6, 4, 1)

        def fold() -> None:
            model = nn.Linear(4, 1)
            amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
            for _ in range(3):
                amp.train_step(lambda x, y: F.mse_loss(model(x), y), *data)

        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            for _ in range(3):
                fold()
                gc.collect()
        assert [each.step for each in steps_in(tmp_path)] == [1, 2, 3] * 3

    def test_watches_may_be_nested(self, tmp_path: Path, untouched: None) -> None:
        session = Session(norm=True)
        with halfstep.watch(tmp_path / "outer", sinks=["jsonl"]) as outer:
            session.step()
            with halfstep.watch(tmp_path / "inner", sinks=["jsonl"]) as inner:
                for _ in range(20):
                    session.step()
                session.clip_wrongly()
            session.step()
        both = [steps_in(tmp_path / name) for name in ("outer", "inner")]
        assert [len(each) for each in both] == [23, 21]
        for one, other in zip(both[0][1:-1], both[1], strict=True):
            assert (one.loss, one.scale, one.lr, one.skipped) == (other.loss, other.scale, other.lr, other.skipped)
        assert [each.rule for each in inner.alerts] == [each.rule for each in outer.alerts] == ["clip_before_unscale"]
        assert outer.alerts[0].site == inner.alerts[0].site

    @pytest.mark.parametrize("before", [0, 20, 45])
    def test_long_runs_may_be_nested(self, before: int, tmp_path: Path, untouched: None) -> None:
        """Some steps are looked at by one of the two, and not by the other."""
        session = Session(norm=True)
        with halfstep.watch(tmp_path / "outer", sinks=["jsonl"]) as outer:
            for _ in range(before):
                session.step()
            with halfstep.watch(tmp_path / "inner", sinks=["jsonl"]) as inner:
                for _ in range(150):
                    session.step()
            for _ in range(100):
                session.step()
        assert (outer.alerts, inner.alerts) == ((), ())
        both = [steps_in(tmp_path / name) for name in ("outer", "inner")]
        assert [len(each) for each in both] == [before + 250, 150]
        for one, other in zip(both[0][before:], both[1], strict=False):
            assert (one.loss, one.scale, one.lr, one.skipped, one.precision) == (
                other.loss, other.scale, other.lr, other.skipped, other.precision
            )  # fmt: skip


class TestDevices:
    @pytest.fixture(autouse=True)
    def elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every tensor is as on an accelerator: its number is not at hand."""
        for name, module in [*sys.modules.items()]:
            if name.startswith("halfstep.watching.") and "number_of" in vars(module):
                monkeypatch.setattr(module, "number_of", lambda tensor: tensor.detach().clone())

    @pytest.fixture
    def transfers(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The sizes of what is read, one for each time that the host waits."""
        seen: list[int] = []
        for name in ("tolist", "item"):
            original = getattr(Tensor, name)

            def read(tensor: Tensor, original: Any = original) -> Any:
                seen.append(tensor.numel())
                return original(tensor)

            monkeypatch.setattr(Tensor, name, read)
        return seen

    def test_numbers_are_read_once_in_many_steps(self, tmp_path: Path, transfers: list[int]) -> None:
        session = Session(fused=True, norm=True)
        expected = []
        with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
            for step in range(100):
                expected.append(session.step(fails=step in {20, 70}).detach())
            assert len(transfers) == 1
            seen.flush()
            assert len(transfers) == 2
        assert len(transfers) == 2
        records = steps_in(tmp_path)
        assert [each.loss for each in records] == pytest.approx([float(each) for each in expected])
        assert [each.step for each in records if each.skipped] == [21, 71]
        assert {each.scaler for each in records} == {"used"}
        assert [each.scale for each in records[:20]] == [2.0**7] * 9 + [2.0**8] * 9 + [2.0**9] * 2
        assert all(each.grad_norm is not None for each in records)

    def test_numbers_are_those_that_are_read_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("late", "at once"):
            session = Session(fused=True, norm=True)
            with halfstep.watch(tmp_path / name, sinks=["jsonl"]):
                for step in range(100):
                    session.step(fails=step in {20, 70})
            monkeypatch.undo()
        late, at_once = (steps_in(tmp_path / name) for name in ("late", "at once"))
        for one, other in zip(late, at_once, strict=True):
            assert (one.skipped, one.scale, one.lr) == (other.skipped, other.scale, other.lr)
            assert one.loss == pytest.approx(other.loss)
            assert other.skipped or one.grad_norm == pytest.approx(other.grad_norm)

    def test_what_only_the_device_knows_is_told_when_it_is_read(self, tmp_path: Path) -> None:
        """A schedule that moves with a skipped step, and buffers that became NaN in one."""
        session = Session(fused=True)
        session.model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
        session.optimizer = torch.optim.SGD(session.model.parameters(), lr=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(session.optimizer)
        with halfstep.watch(tmp_path, sinks=["jsonl"], rules=()) as seen:
            for step in range(6):
                if step == 3:
                    session.x = session.x * math.nan
                session.step()
                schedule.step()
            moved = sys._getframe().f_lineno - 1
            assert not seen.alerts
            seen.flush()
            lines = {each.rule: (each.step, each.site and each.site.line) for each in seen.alerts}
            assert lines.keys() == {"schedule_moved_on_skip", "nonfinite_buffers"}
            assert lines["schedule_moved_on_skip"] == (4, moved)
            assert lines["nonfinite_buffers"][0] == 4
