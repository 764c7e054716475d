"""A watch as a whole: when it begins and how it ends, what it writes, and that nothing is seen of it."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep import HalfstepWarning, MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepError, StepOrderError
from halfstep.journal import Entry, read_run
from halfstep.monitor import AbstractSink
from halfstep.records import Alert, StepRecord
from tests.watching.data import regression
from tests.watching.test_restoration import OWNERS, differences, everything, hooks

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class Session:
    """A scaled training."""

    def __init__(self, *, fused: bool = False, scale: float = 2.0**7, norm: bool = False) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=9)
        self.x, self.y = regression(6, 4, 1)
        self.norm = norm

    def step(self, *, fails: bool = False) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.model(self.x).float(), self.y)
        if fails:
            loss = loss * math.inf
        self.scaler.scale(loss).backward()
        if self.norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def clip_wrongly(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.x).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def train(folder: Path, steps: int, *, scale: float = 2.0**7, error: Exception | None = None, **settings: Any) -> Any:
    """A run of a session, and its watch."""
    session = Session(scale=scale)
    with halfstep.watch(folder, **{"sinks": ["jsonl"], **settings}) as seen:
        for _ in range(steps):
            session.step()
        if error is not None:
            raise error
    return seen


def steps_in(folder: Path) -> list[StepRecord]:
    return [*read_run(folder).records()]


@pytest.fixture
def untouched() -> Any:
    """Torch is in the end what it was in the beginning."""
    Session().step()  # torch wraps the step of a class of optimizers by itself when the first one is made
    before, waiting = everything(), hooks()
    yield
    assert len(OWNERS) > 20
    assert differences(before, everything()) == set()
    assert hooks() == waiting


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


class TestNothingIsKept:
    def test_what_is_trained_may_go(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
            for steps in (3, 60):
                session = Session(norm=True)
                schedule = torch.optim.lr_scheduler.LinearLR(session.optimizer)
                for _ in range(steps):
                    loss = session.step()
                    schedule.step()
                kept: list[Any] = [ref(each) for each in (session.model, session.optimizer, session.scaler, schedule, loss)]
                del session, schedule, loss
                gc.collect()
                assert [each() for each in kept] == [None] * 5
            seen.flush()

    def test_its_parameters_may_go(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=["jsonl"]):
            session = Session()
            for _ in range(3):
                session.step()
            kept = [ref(each) for each in session.model.parameters()]
            del session
            gc.collect()
            assert [each() for each in kept] == [None] * len(kept)

    def test_a_loss_may_go_at_once(self, tmp_path: Path) -> None:
        with halfstep.watch(tmp_path, sinks=()):
            session = Session()
            assert [ref(session.step())() for _ in range(45)] == [None] * 45

    def test_a_window_keeps_no_gradients(self, tmp_path: Path) -> None:
        session = Session()
        with halfstep.watch(tmp_path, sinks=()):
            session.scaler.scale(session.model(session.x).mean()).backward()
            weights: Any = [*session.model.parameters()]
            kept = [ref(each.grad) for each in weights]
            session.optimizer.zero_grad()
            assert [each() for each in kept] == [None] * len(kept)


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
                seen.__exit__(None, None, None)
                status = 0 if (seen.alerts, everything()["torch.autocast"]) == ((), AUTOCAST) else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.step()
    saved = read_run(tmp_path)
    assert saved.steps.step.tolist() == [1, 2]
    assert [each.outcome for each in saved.ends] == ["finished"]
    assert (saved.alerts, saved.notes) == ((), ())


AUTOCAST = everything()["torch.autocast"]


def made_wrongly() -> None:
    """Each of these lines draws a warning of torch's."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    schedule.step()
    schedule.step(2)
    torch.amp.GradScaler("cuda")
    torch.cuda.amp.GradScaler()
    with torch.autocast("cpu", dtype=torch.float64):
        pass
    with torch.autocast("cuda", dtype=torch.float16):
        pass
    amp: Any = torch
    with amp.cuda.amp.autocast(), amp.cpu.amp.autocast():
        pass
    weight.grad = torch.ones(2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    list(DataLoader(TensorDataset(torch.ones(2)), num_workers=0, prefetch_factor=None))
    nn.utils.clip_grad_norm_([], 1.0)


def backward_of_old() -> None:
    torch.autograd.backward(torch.ones((), requires_grad=True), grad_variables=torch.ones(()))


def warnings_of(run: Callable[[], None]) -> list[tuple[str, str, str, int]]:
    torch.optim.lr_scheduler.LRScheduler  # noqa: B018 - it is loaded before anything is counted
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [(each.category.__name__, str(each.message), each.filename, each.lineno) for each in seen]


def test_warnings_of_torch_name_the_lines_that_they_name_without_a_watch(tmp_path: Path, untouched: None) -> None:
    alone = warnings_of(made_wrongly)
    with halfstep.watch(tmp_path, sinks=()):
        watched = warnings_of(made_wrongly)
    assert watched == alone
    own = {line for _, _, file, line in alone if file == __file__}
    assert len(own) >= 4


def test_warnings_of_a_backward_pass_name_its_line(tmp_path: Path) -> None:
    alone = warnings_of(backward_of_old)
    with halfstep.watch(tmp_path, sinks=()):
        watched = warnings_of(backward_of_old)
    assert [file for _, _, file, _ in alone] == [__file__]
    assert watched == alone


def test_a_value_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HalfstepError, match="There is no sink 'json'"), halfstep.watch(tmp_path, sinks=["json"]):
        raise AssertionError


def test_torch_is_one_that_was_tried() -> None:
    assert TorchVersion(torch.__version__) >= "2.9"
