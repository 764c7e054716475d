"""Backward passes: when gradients are looked at closely, and whose passes count."""

# Loops read as their users write them, and `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.journal import read_run
from halfstep.watching.lines import Line
from halfstep.watching.passes import BackwardEvents
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, RegionState
from halfstep.watching.windows import GradientWindow

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


class Passes:
    """An optimizer, and backward passes that are taken in."""

    def __init__(self) -> None:
        self.scene = Scene(observe=lambda *_: None, tell=lambda alert: self.rules.append(alert.rule))
        self.events = BackwardEvents(self.scene)
        self.rules: list[str] = []
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    @property
    def state(self) -> OptimizerState:
        state = self.scene.optimizer(self.optimizer)
        assert state is not None
        return state

    def backward(self, loss: Any = None, **keywords: Any) -> list[float | Tensor]:
        """Returns the losses that the gradients are of."""
        self.state.refresh()
        loss = self.weight.square().sum() if loss is None else loss
        begun = self.events.begin(loss, (), keywords, None)
        torch.autograd.backward(loss, **keywords)
        if begun is not None:
            self.events.end(begun)
        return [each.loss for each in self.state.contributions]


@pytest.fixture
def passes() -> Passes:
    return Passes()


def test_a_step_divides_what_comes_before_from_what_comes_after(passes: Passes) -> None:
    assert passes.backward() == [2.0]
    assert passes.backward() == [2.0, 2.0]
    passes.state.is_stepped = True
    assert passes.backward() == [2.0]
    assert not passes.state.is_stepped


def test_a_pass_that_fails_adds_nothing(passes: Passes) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        passes.backward(torch.ones(()))
    assert passes.state.contributions == []


@pytest.mark.parametrize("nothing", [[], (), None, [None], "loss"], ids=str)
def test_what_is_no_tensor_is_none(passes: Passes, nothing: Any) -> None:
    assert passes.events.begin(nothing, (), {}, None) is None


def test_the_passes_of_another_thread_are_none_of_an_optimizers(passes: Passes) -> None:
    passes.state.thread = threading.get_ident() + 1
    assert passes.backward() == []
    passes.state.thread = threading.get_ident()
    assert passes.backward() == [2.0]


def test_a_loop_that_never_zeroes_does_not_fill_the_memory(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.watching.passes._MOST_CONTRIBUTIONS", 5)
    for count in range(1, 9):
        assert len(passes.backward()) == min(count, 5)


def test_a_pass_within_a_pass_is_a_part_of_it(tmp_path: Path) -> None:
    """Checkpointing that is reentrant calls backward within backward."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with halfstep.watch(tmp_path, sinks=["jsonl"]):
        for _ in range(60):
            optimizer.zero_grad()
            x = torch.ones(1, 2, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=True).square().sum()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert [each.loss for each in read_run(tmp_path).records()] == pytest.approx(expected)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In which iterations a window was opened."""
    seen: list[int] = []
    original: Callable[[GradientWindow], None] = GradientWindow.open

    def see(window: GradientWindow) -> None:
        seen.append(iteration[0])
        original(window)

    monkeypatch.setattr(GradientWindow, "open", see)
    yield seen
    iteration[0] = 0


iteration = [0]


def test_scaled_gradients_are_looked_at_in_the_first_iterations_and_then_in_few(opened: list[int], tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(tmp_path, sinks=()):
        for iteration[0] in range(1, 41):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            assert torch._C._len_torch_dispatch_stack() == (iteration[0] in {1, 2, 3, 4, 8, 16, 32})
            scaler.step(optimizer)
            scaler.update()
            assert torch._C._len_torch_dispatch_stack() == 0
    assert opened == [1, 2, 3, 4, 8, 16, 32]


def test_gradients_that_are_not_scaled_are_not_looked_at(opened: list[int], tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.watch(tmp_path, sinks=()):
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert opened == []


def test_a_window_ends_at_the_next_pass_or_region(opened: list[int], tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(tmp_path, sinks=()) as seen:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        assert torch._C._len_torch_dispatch_stack() == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch._C._len_torch_dispatch_stack() == 0
        scaler.step(optimizer)
        scaler.update()
    assert seen.alerts == ()
    assert len(opened) == 2


def test_an_update_between_passes_that_are_added_up_is_told_at_their_step(tmp_path: Path) -> None:
    """No harm is done before it: gradients may still be thrown away."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(tmp_path, sinks=()) as seen:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            told = [each.rule for each in seen.alerts]
            scaler.update()
        assert told == ["repeated_update"]


def test_a_window_of_another_thread_is_not_opened(opened: list[int], tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with halfstep.watch(tmp_path, sinks=()):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert opened == []


def region(device: str, *, is_direct: bool, dtype: torch.dtype | None = torch.bfloat16) -> RegionState:
    line = Line("train.py", 1, is_direct=is_direct)
    return RegionState(identity=0, device_type=device, dtype=dtype, is_meant=True, keeps_casts=True, is_training=True, line=line)


@pytest.mark.parametrize(
    ("regions", "told"),
    [
        ([region("cpu", is_direct=True)], True),
        ([region("cpu", is_direct=False)], False),
        ([region("cpu", is_direct=False), region("cpu", is_direct=True)], True),
        ([region("cpu", is_direct=True), region("cpu", is_direct=False)], False),
        ([region("cpu", is_direct=True), region("cuda", is_direct=False)], True),
        ([region("cpu", is_direct=True), region("cpu", is_direct=False, dtype=None)], True),
    ],
    ids=["of one's own", "of a library", "of one's own in that of a library", "the other way round", "of another device", "switched off"],
)
def test_a_pass_in_a_region_is_told_where_the_user_entered_it(passes: Passes, regions: list[RegionState], told: bool) -> None:
    loss = passes.weight.square().sum()
    passes.scene.thread.regions.extend(regions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passes.backward(loss)
    assert passes.rules == ["backward_in_autocast"] * told


@pytest.mark.parametrize("steps", [5, 60])
def test_a_pass_that_a_hook_makes_is_a_part_of_the_one_that_it_is_in(steps: int, tmp_path: Path) -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    expected: list[float] = []
    with halfstep.watch(tmp_path, sinks=["jsonl"]):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = weight.square().sum()
            if not expected:
                weight.register_hook(torch.enable_grad()(lambda _: other.sum().backward()))
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert [each.loss for each in read_run(tmp_path).records()] == pytest.approx(expected)
