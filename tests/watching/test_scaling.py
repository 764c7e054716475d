"""What a loop does with its loss scalers, told at the moment at which it becomes wrong."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import halfstep
from halfstep import PersistentSkipsError
from halfstep.journal import read_run
from halfstep.records import Alert

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class Session:
    def __init__(self, *, scale: float = 4.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def backward(self, scaler: Any = None) -> float:
        loss = self.model(torch.ones(1, 2)).square().sum()
        (scaler or self.scaler).scale(loss).backward()
        return float(loss.detach())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, limit: float = 1.0) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), limit)


class Seen:
    """What was said, to be looked at in the middle of a loop."""

    def __init__(self, watch: Any) -> None:
        self.watch = watch

    @property
    def rules(self) -> list[str]:
        return [each.rule for each in self.watch.alerts]

    @property
    def last(self) -> Alert:
        alert: Alert = self.watch.alerts[-1]
        return alert


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    with halfstep.watch(tmp_path, sinks=["jsonl"], rules=()) as watch:
        yield Seen(watch)


def test_a_second_unscaling_is_told_before_torch_refuses_it(seen: Seen) -> None:
    session = Session()
    session.backward()
    session.scaler.unscale_(session.optimizer)
    assert seen.rules == []
    with pytest.raises(RuntimeError, match="has already been called"):
        session.scaler.unscale_(session.optimizer)
    assert seen.rules == ["missing_update"]
    assert seen.last.message.startswith("unscale_ is called again for the same optimizer")
    session.scaler.update()


def test_unscaling_after_a_step_is_told_as_well(seen: Seen) -> None:
    session = Session()
    session.backward()
    session.scaler.step(session.optimizer)
    assert seen.rules == []
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        session.scaler.unscale_(session.optimizer)
    assert seen.rules == ["missing_update"]
    session.scaler.update()


def test_what_an_update_ends_may_be_done_again(seen: Seen) -> None:
    session = Session()
    for _ in range(50):
        session.optimizer.zero_grad()
        session.backward()
        session.scaler.unscale_(session.optimizer)
        session.clip()
        session.scaler.step(session.optimizer)
        session.scaler.update()
    assert seen.rules == []


def test_gradients_that_were_unscaled_are_scaled_again_after_the_update(seen: Seen) -> None:
    """In a step that is left out, nothing was stepped, and the next gradients are scaled."""
    session = Session()
    session.backward()
    session.scaler.unscale_(session.optimizer)
    session.clip()
    session.scaler.update()
    session.optimizer.zero_grad()
    session.backward()
    session.clip()
    assert seen.rules == ["clip_before_unscale"]
    session.scaler.step(session.optimizer)
    session.scaler.update()


def test_gradients_that_were_stepped_with_may_be_looked_at(seen: Seen) -> None:
    """They are unscaled by then."""
    session = Session()
    session.backward()
    session.scaler.step(session.optimizer)
    nn.utils.clip_grad_norm_(session.model.parameters(), math.inf)
    session.scaler.update()
    assert seen.rules == []


@pytest.mark.parametrize(("limit", "rule"), [(1.0, "clip_before_unscale"), (math.inf, "scaled_norm_logged")])
def test_it_says_what_the_norm_is_and_would_be(limit: float, rule: str, seen: Seen) -> None:
    session = Session(scale=1024.0)
    session.backward()
    norm = math.hypot(*(float(each.grad.norm()) for each in session.model.parameters() if each.grad is not None))
    session.clip(limit)
    assert seen.rules == [rule]
    assert f"multiplied with 1,024: a norm of {norm:.4g} in the place of {norm / 1024:.4g}." in seen.last.message


def test_an_unscaled_pass_is_told_when_its_scaler_steps_and_not_after_that(seen: Seen) -> None:
    session = Session()
    session.backward()
    session.model(torch.ones(1, 2)).sum().backward()
    assert seen.rules == []
    session.scaler.step(session.optimizer)
    assert seen.rules == ["unscaled_backward"]
    session.scaler.update()
    session.step()
    assert seen.rules == ["unscaled_backward"]


def test_a_scaler_is_made_in_the_loop_only_where_it_is_made_again_and_steps(seen: Seen) -> None:
    session, other = Session(), Session()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(3)]
    for scaler, each in zip(scalers, (session, other, other), strict=True):
        each.optimizer.zero_grad()
        each.backward(scaler)
        scaler.unscale_(each.optimizer)
        if scaler is not scalers[1]:
            scaler.step(each.optimizer)
        scaler.update()
    assert seen.rules == []
    session.optimizer.zero_grad()
    session.backward(scalers[2])
    scalers[2].step(session.optimizer)
    scalers[2].update()
    assert seen.rules == ["scaler_created_in_loop"]


def test_scalers_that_were_made_before_are_not_said_to_be_made_at_one_place(tmp_path: Path) -> None:
    session = Session()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    with halfstep.watch(tmp_path, sinks=()) as watch:
        for scaler in scalers:
            session.optimizer.zero_grad()
            session.backward(scaler)
            scaler.step(session.optimizer)
            scaler.update()
    assert watch.alerts == ()


def test_a_state_is_taken_too_early_between_step_and_update_alone(seen: Seen) -> None:
    session = Session()
    session.scaler.state_dict()
    session.backward()
    session.scaler.state_dict()
    session.scaler.step(session.optimizer)
    assert seen.rules == []
    session.scaler.state_dict()
    assert seen.rules == ["state_saved_before_update"]
    assert seen.last.step == 2
    session.scaler.update()
    session.scaler.state_dict()
    assert seen.rules == ["state_saved_before_update"]


def test_a_scaler_that_is_gone_is_told_at_the_end(tmp_path: Path) -> None:
    session = Session()
    with halfstep.watch(tmp_path, sinks=(), rules=()) as watch:
        session.backward()
        session.scaler.step(session.optimizer)
        del session
        gc.collect()
        assert not watch.alerts
    assert [each.rule for each in watch.alerts] == ["missing_update"]


def test_a_scaler_that_never_stepped_needs_no_update(tmp_path: Path) -> None:
    session = Session()
    with halfstep.watch(tmp_path, sinks=(), rules=()) as watch:
        session.backward()
    assert watch.alerts == ()


def test_the_scale_is_that_which_the_loss_was_multiplied_with(seen: Seen, tmp_path: Path) -> None:
    """Also where somebody sets another one before the step."""
    session = Session()
    expected = []
    for scale in (4.0, 16.0, 2.0):
        if scale != 4.0:
            session.scaler.update(scale)
        session.optimizer.zero_grad()
        expected.append(session.backward())
        session.scaler.step(session.optimizer)
        session.scaler.update()
    seen.watch.flush()
    records = [*read_run(tmp_path).records()]
    assert [each.scale for each in records] == [4.0, 16.0, 2.0]
    assert [each.loss for each in records] == pytest.approx(expected)


@pytest.mark.parametrize("change", [lambda session: session.scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))], ids=["step"])
def test_what_torch_refuses_is_still_refused(change: Callable[[Session], None], seen: Seen) -> None:
    session = Session()
    session.backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        change(session)
    session.scaler.step(session.optimizer)
    session.scaler.update()
    assert seen.rules == []


def test_a_pass_after_unscaling_is_added_to_those_before(seen: Seen, tmp_path: Path) -> None:
    session = Session()
    losses = [session.backward()]
    session.scaler.unscale_(session.optimizer)
    losses.append(session.backward())
    session.scaler.step(session.optimizer)
    session.scaler.update()
    seen.watch.flush()
    assert [each.loss for each in read_run(tmp_path).records()] == pytest.approx([sum(losses)])


def test_a_scaler_that_was_made_before_is_named_by_its_first_use(tmp_path: Path) -> None:
    session = Session()
    lines = []
    with halfstep.watch(tmp_path, sinks=()) as watch:
        for step in range(4):
            session.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = session.model(torch.ones(1, 2)).float().sum()
            if step == 0:
                session.scaler.scale(loss).backward()
                lines.append(sys._getframe().f_lineno - 1)
            else:
                session.scaler.scale(loss).backward()
            session.scaler.step(session.optimizer)
            session.scaler.update()
    assert [(each.rule, each.site.line if each.site else 0) for each in watch.alerts] == [("scaler_with_bf16", lines[0])]


def test_a_factor_is_kept_until_the_update(seen: Seen) -> None:
    session = Session()
    for _ in range(3):
        factor = session.scaler.scale(torch.ones(()))
        (session.model(torch.ones(1, 2)).sum() * factor).backward()
        session.scaler.step(session.optimizer)
        kept = ref(factor)
        del factor
        assert kept() is not None  # Its memory is what it is known by.
        session.scaler.update()
        session.optimizer.zero_grad()
        assert kept() is None
    assert seen.rules == []


@pytest.mark.parametrize("stepped", [True, False])
def test_a_direct_step_is_told_with_what_came_before(stepped: bool, seen: Seen, tmp_path: Path) -> None:
    session = Session()
    session.backward()
    if stepped:
        session.scaler.step(session.optimizer)
    else:
        session.scaler.unscale_(session.optimizer)
    session.optimizer.step()
    assert seen.rules == ["optimizer_step_bypasses_scaler"]
    how = "after scaler.step" if stepped else "on the gradients of a scaled loss"
    assert seen.last.message.startswith(f"SGD.step() is called directly {how}.")
    session.scaler.update()
    seen.watch.flush()
    assert {each.scaler for each in read_run(tmp_path).records()} == {"used"}


class TestLater:
    """After many steps that are alike, something else happens."""

    @pytest.fixture
    def session(self, seen: Seen) -> Session:
        session = Session()
        for _ in range(50):
            session.step()
        assert seen.rules == []
        return session

    def test_a_step_without_an_update(self, session: Session, seen: Seen) -> None:
        for _ in range(2):
            session.optimizer.zero_grad()
            session.backward()
            if _ == 0:
                session.scaler.step(session.optimizer)
        with pytest.raises(RuntimeError, match="has already been called"):
            session.scaler.step(session.optimizer)
        assert seen.rules == ["missing_update"]
        session.scaler.update()

    def test_another_scaler(self, session: Session, seen: Seen, tmp_path: Path) -> None:
        session.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
        for _ in range(50):
            session.step()
        seen.watch.flush()
        assert seen.rules == []
        assert [each.scale for each in read_run(tmp_path).records()] == [4.0] * 50 + [32.0] * 50

    def test_a_skip_that_leaves_buffers_broken(self, seen: Seen) -> None:
        session = Session()
        model: Any = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        session.model, session.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(4, 2)
        for step in range(50):
            session.optimizer.zero_grad()
            session.scaler.scale(model(x * (math.nan if step == 45 else 1.0)).square().sum()).backward()
            session.scaler.step(session.optimizer)
            session.scaler.update()
        assert [(each.rule, each.step) for each in seen.watch.alerts] == [("nonfinite_buffers", 46)]

    def test_a_schedule_that_moves_on_a_skip(self, seen: Seen) -> None:
        session = Session()
        schedule = torch.optim.lr_scheduler.ConstantLR(session.optimizer)
        for step in range(50):
            session.optimizer.zero_grad()
            loss = session.model(torch.ones(1, 2)).square().sum() * (math.inf if step == 45 else 1.0)
            session.scaler.scale(loss).backward()
            session.scaler.step(session.optimizer)
            session.scaler.update()
            schedule.step()
        assert [(each.rule, each.step) for each in seen.watch.alerts] == [("schedule_moved_on_skip", 46)]

    def test_skips_that_the_run_is_ended_for(self, tmp_path: Path) -> None:
        session = Session()
        done = []

        def train() -> None:
            with halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="raise"):
                for step in range(150):
                    session.optimizer.zero_grad()
                    loss = session.model(torch.ones(1, 2)).square().sum() * (math.inf if step >= 60 else 1.0)
                    session.scaler.scale(loss).backward()
                    session.scaler.step(session.optimizer)
                    session.scaler.update()
                    done.append(step)

        with pytest.raises(PersistentSkipsError, match="in a row were skipped"):
            train()
        assert 69 <= len(done) <= 75
