"""What is known of a process: its optimizers and scalers, their names, and what was said of them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import LossScaler, MixedPrecision, PersistentSkipsError
from halfstep.records import Alert
from halfstep.watching.lines import NOWHERE, Line
from halfstep.watching.scene import Scene, current_scale
from halfstep.watching.states import RegionState
from halfstep.watching.windows import GradientWindow

pytestmark = pytest.mark.usefixtures("one_thread", "alone_in_process")


@pytest.fixture
def alerts() -> list[Alert]:
    return []


@pytest.fixture
def scene(alerts: list[Alert]) -> Scene:
    return Scene(observe=lambda *_: None, tell=alerts.append)


def optimizer(count: int = 1, kind: Any = torch.optim.SGD) -> Any:
    return kind([nn.Parameter(torch.ones(2)) for _ in range(count)], lr=0.1)


def line(number: int, file: str = "train.py") -> Line:
    return Line(file, number, is_direct=True)


class TestTelling:
    def test_once_for_each_line(self, scene: Scene, alerts: list[Alert]) -> None:
        for place in (line(3), line(3), line(4), line(3, "other.py")):
            scene.tell("missing_update", place, seen="It is missing.")
        scene.tell("repeated_update", line(3), seen="It is repeated.")
        assert [(each.rule, each.place) for each in alerts] == [
            ("missing_update", "train.py:3"),
            ("missing_update", "train.py:4"),
            ("missing_update", "other.py:3"),
            ("repeated_update", "train.py:3"),
        ]
        assert alerts[0].message.startswith("It is missing. ")

    def test_at_most_twenty_of_one_kind(self, scene: Scene, alerts: list[Alert]) -> None:
        for number in range(30):
            assert scene.is_told("missing_update", line(number)) == (number >= 20)
            scene.tell("missing_update", line(number), seen="It is missing.")
        assert len(alerts) == 20
        assert not scene.is_told("repeated_update", line(1))
        scene.tell("repeated_update", line(1), seen="It is repeated.")
        assert len(alerts) == 21

    def test_the_step_is_the_next_of_the_optimizer_that_it_is_about(self, scene: Scene, alerts: list[Alert]) -> None:
        first, second = optimizer(), optimizer()
        states = [scene.optimizer(each) for each in (first, second)]
        for state, steps in zip(states, (3, 8), strict=True):
            assert state is not None
            state.steps = steps
        scene.tell("missing_update", line(1), seen="", state=states[0])
        scene.tell("missing_update", line(2), seen="")
        scene.tell("missing_update", line(3), seen="", at=2, module="head")
        assert [each.step for each in alerts] == [4, 9, 2]
        assert alerts[2].place == "train.py:3, head"

    def test_without_an_optimizer_it_is_the_first(self, scene: Scene, alerts: list[Alert]) -> None:
        scene.tell("missing_update", NOWHERE, seen="")
        assert [(each.step, each.place) for each in alerts] == [(1, "")]


class TestOptimizers:
    def test_one_is_known_as_long_as_it_lives(self, scene: Scene) -> None:
        made = optimizer()
        state = scene.optimizer(made)
        assert state is not None
        assert scene.optimizer(made) is state
        assert scene.free_optimizers() == [state]
        del made
        gc.collect()
        assert scene.free_optimizers() == []
        assert state.optimizer() is None

    def test_one_that_an_engine_takes_is_let_go(self, scene: Scene) -> None:
        model = nn.Linear(2, 1)
        free, taken = optimizer(), torch.optim.SGD(model.parameters(), lr=0.1)
        states = [scene.optimizer(each) for each in (free, taken)]
        assert None not in states
        engine = MixedPrecision(model, taken, "fp32")
        assert scene.optimizer(taken) is None
        assert scene.optimizer(free) is states[0]
        assert scene.free_optimizers() == [states[0]]
        del engine

    def test_one_that_an_engine_takes_is_let_go_at_a_backward_pass(self, scene: Scene) -> None:
        model = nn.Linear(2, 1)
        taken = torch.optim.SGD(model.parameters(), lr=0.1)
        scene.optimizer(taken)
        engine = MixedPrecision(model, taken, "fp32")
        assert scene.free_optimizers() == []
        del engine

    def test_one_that_an_engine_takes_when_another_ends_is_let_go(self, scene: Scene) -> None:
        """How many engines drive does not change then."""

        def fold() -> None:
            model = nn.Linear(2, 1)
            made = torch.optim.SGD(model.parameters(), lr=0.1)
            scene.optimizer(made)
            engine = MixedPrecision(model, made, "fp32")
            assert scene.optimizer(made) is None
            assert scene.free_optimizers() == []
            del engine

        for _ in range(3):
            fold()
            gc.collect()

    def test_what_knows_no_weak_references_is_left_alone(self, scene: Scene) -> None:
        class Slotted:
            __slots__ = ("param_groups",)

        assert scene.optimizer(Slotted()) is None

    def test_they_are_named_where_there_are_several(self, scene: Scene) -> None:
        made = [optimizer(kind=kind) for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.SGD)]
        states = [scene.optimizer(each) for each in made]
        assert [scene.name(state) for state in states if state is not None] == ["SGD", "AdamW", "SGD 2"]

    def test_one_that_is_alone_has_no_name_and_those_after_it_have(self, scene: Scene) -> None:
        first = scene.optimizer(made := optimizer())
        assert first is not None
        assert scene.name(first) == ""
        del made
        gc.collect()
        later = [optimizer(), optimizer(kind=torch.optim.AdamW)]
        assert [scene.name(state) for state in map(scene.optimizer, later) if state is not None] == ["SGD 2", "AdamW"]

    def test_of_very_many_the_last_share_a_name(self, scene: Scene) -> None:
        made = [optimizer() for _ in range(35)]
        names = [scene.name(state) for state in [*map(scene.optimizer, made)] if state is not None]
        assert names == ["SGD", *(f"SGD {number}" for number in range(2, 33)), *["SGD (others)"] * 3]

    def test_gradients_are_those_of_an_optimizer_by_any_of_them(self, scene: Scene) -> None:
        many, few, other = optimizer(5), optimizer(2), optimizer(1)
        states = [scene.optimizer(each) for each in (many, few, other)]
        parameters = [each for made in (many, few) for each in made.param_groups[0]["params"]]
        assert [*scene.receivers(parameters)] == states[:2]
        assert [*scene.receivers(parameters[:3])] == states[:1]
        assert [*scene.receivers(parameters[6:])] == states[1:2]
        assert [*scene.receivers([])] == []
        assert [*scene.receivers([torch.ones(1)])] == []


class TestScalers:
    def test_one_that_is_switched_off_is_none(self, scene: Scene) -> None:
        assert scene.scaler(torch.amp.GradScaler("cpu", enabled=False)) is None
        assert scene.scaler(object()) is None
        assert scene.scalers == {}

    def test_one_that_is_gone_and_never_updated_is_kept_in_mind(self, scene: Scene) -> None:
        for steps, updates in ((3, 0), (3, 3), (0, 0)):
            state = scene.scaler(made := torch.amp.GradScaler("cpu"))
            assert state is not None
            state.steps, state.updates = steps, updates
            del made
            gc.collect()
        assert [(each.steps, each.updates) for each in scene.retired] == [(3, 0)]
        assert scene.scalers == {}

    def test_one_that_was_never_used_is_found(self, scene: Scene) -> None:
        made = [torch.amp.GradScaler("cpu") for _ in range(2)]
        states = [scene.scaler(each) for each in made]
        assert scene.unused_scaler() is states[0]
        for state in states:
            assert state is not None
            state.first_use = line(1)
        assert scene.unused_scaler() is None

    def test_its_scale(self) -> None:
        torchs, own = torch.amp.GradScaler("cpu", init_scale=8.0), LossScaler("cpu", init_scale=16.0)
        assert current_scale(torchs) == 8.0
        torchs.scale(torch.ones(()))
        torchs.update(4.0)
        assert (current_scale(torchs), current_scale(own)) == (4.0, 16.0)


class TestExisting:
    def test_what_was_made_before_is_found(self, scene: Scene) -> None:
        made, bare = optimizer(), torch.optim.SGD.__new__(torch.optim.SGD)
        scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
        scene.find_existing()
        assert [each.optimizer() for each in scene.free_optimizers()] == [made]
        assert [each.scaler() for each in scene.scalers.values()] == [scaler]
        del bare, off

    def test_what_nobody_holds_is_not(self, scene: Scene) -> None:
        made = optimizer()
        made.cycle = made
        del made
        scene.find_existing()
        assert scene.free_optimizers() == []

    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, LossScaler])
    @pytest.mark.parametrize("used", [True, False])
    def test_it_is_known_which_scalers_were_used(self, kind: Any, used: bool, scene: Scene) -> None:
        made, stepped = optimizer(), kind("cpu")
        if used:
            stepped.scale(made.param_groups[0]["params"][0].sum()).backward()
            stepped.step(made)
            stepped.update()
        scene.find_existing()
        assert [each.is_used for each in scene.scalers.values()] == [used]

    def test_what_an_engine_drives_is_none_of_it(self, scene: Scene) -> None:
        model = nn.Linear(2, 1)
        engine = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
        scene.find_existing()
        assert scene.free_optimizers() == []
        del engine


def region(device: str = "cpu") -> RegionState:
    return RegionState(identity=0, device_type=device, dtype=torch.float16, is_meant=True, keeps_casts=True, is_training=True, line=line(1))


class TestTrainingRegion:
    @pytest.mark.parametrize(("count", "lasts"), [(0, 1), (1, 1), (2, 2), (3, 3)])
    def test_it_lasts_until_each_optimizer_has_stepped(self, count: int, lasts: int, scene: Scene) -> None:
        made = [optimizer() for _ in range(count)]
        for each in made:
            scene.optimizer(each)
        scene.steps = 7
        entered = region()
        scene.thread.entered["cpu"] = entered, 7
        found = []
        for _ in range(5):
            found.append(scene.training_region("cpu") is entered)
            scene.steps += 1
        assert found == [True] * lasts + [False] * (5 - lasts)

    def test_it_is_that_of_the_device_or_else_the_last(self, scene: Scene) -> None:
        first, last = region("cuda"), region("cpu")
        for each in (first, last):
            scene.thread.entered[each.device_type] = each, 0
        assert [scene.training_region(device) for device in ("cuda", "cpu", "xpu", None)] == [first, last, None, last]

    def test_another_thread_has_none(self, scene: Scene) -> None:
        scene.thread.entered["cpu"] = region(), 0
        seen = []
        thread = threading.Thread(target=lambda: seen.append(scene.training_region("cpu")))
        thread.start()
        thread.join()
        assert seen == [None]


def test_the_devices_are_those_of_the_optimizers(scene: Scene) -> None:
    assert scene.device_types() == set()
    made = [optimizer(), torch.optim.SGD([nn.Parameter(torch.empty(1, device="meta"))], lr=0.1)]
    for each in made:
        scene.optimizer(each)
    assert scene.device_types() == {"cpu", "meta"}


class TestFailures:
    """What goes wrong in a watch is not the script's concern."""

    def test_it_is_told_once_and_the_process_is_followed_no_longer(
        self, scene: Scene, failures: list[Exception], capsys: pytest.CaptureFixture[str]
    ) -> None:
        for _ in range(2):
            try:
                raise KeyError("lost")
            except KeyError as error:
                scene.failed(error)
        assert not scene.is_active
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "not watched any longer, since KeyError: 'lost'" in told
        assert "test_scene.py" in told
        failures.clear()

    def test_what_is_meant_to_reach_the_script_does(self, scene: Scene) -> None:
        meant = ValueError("stop")
        scene.meant.append(meant)
        for error in (meant, PersistentSkipsError("too many")):
            with pytest.raises(type(error), match=r"stop|too many"):
                scene.failed(error)
        assert scene.is_active


def test_what_a_window_has_seen_is_told_when_it_is_closed(scene: Scene, alerts: list[Alert]) -> None:
    made = optimizer()
    state = scene.optimizer(made)
    assert state is not None
    state.steps = 6
    gradient = torch.ones(2)
    here: Any = scene.thread
    here.window = GradientWindow(state, [gradient], scale="the loss scale of 4")
    here.window.open()
    gradient.norm()
    scene.close_window()
    assert [(each.rule, each.step) for each in alerts] == [("scaled_norm_logged", 7)]
    assert here.window is None
    assert torch._C._len_torch_dispatch_stack() == 0
    scene.close_window()
    assert len(alerts) == 1
