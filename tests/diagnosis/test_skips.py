"""`halfstep.diagnose_skips`: a loop that halfstep does not own finds out why it skips."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import LossScaler, diagnose_skips
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.records import Diagnosis
from tests.diagnosis.tasks import BREAKING, Net, line_that_breaks
from tests.engine.loops import same_state

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINALS = {kind: vars(kind)["update"] for kind in (torch.amp.GradScaler, LossScaler)}
SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    "halfstep": lambda: LossScaler("cpu", init_scale=64.0, max_consecutive_skips=None),
}


@pytest.fixture(autouse=True)
def all_is_put_back() -> Iterator[None]:
    """After each test, whatever became of it: classes are as they were, and no trace is open."""
    yield
    assert {kind: vars(kind)["update"] for kind in ORIGINALS} == ORIGINALS
    with halfstep.trace():
        pass


class Loop:
    """A loop as torch's documentation has it."""

    def __init__(self, scaler: torch.amp.GradScaler, *, fused: bool = False, logs_late: bool = False) -> None:
        torch.manual_seed(3)
        self.logs_late = logs_late
        self.model, self.scaler = Net(), scaler
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.generator = torch.Generator().manual_seed(5)
        self.losses: list[float] = []

    def step(self, factor: float) -> None:
        x = torch.randn(6, 4, generator=self.generator)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(x, factor).float().square().mean()
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        if not self.logs_late:
            self.losses.append(loss.item())
        self.scaler.update()  # here: told
        self.optimizer.zero_grad(set_to_none=not self.logs_late)
        if self.logs_late:
            self.losses.append(loss.item())

    def run(self, story: str) -> None:
        for letter in story:
            self.step(BREAKING if letter == "F" else 1.0)

    def left(self) -> Any:
        return self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict(), self.losses, torch.get_rng_state()


def is_found(diagnosis: Diagnosis | None) -> bool:
    assert diagnosis is not None
    assert diagnosis.origin is not None, diagnosis
    origin = diagnosis.origin
    found = (diagnosis.cause, origin.op, origin.site.module, Path(origin.site.file).name, origin.site.line)
    return found == ("forward", "aten.mul.Tensor", "wide", "tasks.py", line_that_breaks())


@pytest.fixture(params=SCALERS)
def scaler(request: pytest.FixtureRequest) -> torch.amp.GradScaler:
    return SCALERS[request.param]()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_the_step_after_so_many_skips_is_diagnosed(scaler: torch.amp.GradScaler, after: int, fused: bool) -> None:
    loop = Loop(scaler, fused=fused)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=after, on_diagnosis=told.append) as watch:
        loop.run(".." + "F" * after)
        early = [*told, watch.diagnosis]
        loop.run("F")
    assert early == [None]
    assert watch.diagnosis is told[-1]
    (diagnosis,) = told
    assert is_found(diagnosis)
    assert (diagnosis.step, diagnosis.steps, diagnosis.skips) == (after + 3, after + 3, after + 1)
    assert (diagnosis.replays, diagnosis.verified, diagnosis.is_reproduced, diagnosis.task) == (0, False, True, "Net")
    assert diagnosis.scale == scaler.get_scale() * 2.0
    assert Diagnosis.from_json(diagnosis.to_json()).to_json() == diagnosis.to_json()
    assert watch.scaler is scaler


def test_a_warning_says_it_at_the_users_line(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    with (
        diagnose_skips(scaler, model=loop.model, after=2),
        pytest.warns(HalfstepWarning, match=r"^2 steps in a row were skipped\. Diagnosis: forward, at wide \(") as told,
    ):
        loop.run("FFF")
    (warning,) = told
    assert warning.filename == __file__
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[warning.lineno - 1].endswith("self.scaler.update()  # here: told")


@pytest.mark.parametrize("story", ["FFFFFFF", "FFF.FFFF", ".FF.FFF.F.FFF", "FF"])
@pytest.mark.parametrize("fused", [True, False])
def test_once_for_each_run_of_skips(scaler: torch.amp.GradScaler, story: str, fused: bool) -> None:
    loop = Loop(scaler, fused=fused)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=told.append):
        loop.run(story + ".")
    # A step that is traced and taken ends a run of two, and cannot tell why.
    expected = ["forward" if len(run) > 2 else "healthy" for run in story.split(".") if len(run) > 1]
    assert [each.cause for each in told] == expected
    assert [each.is_reproduced for each in told] == [each == "forward" for each in expected]


def test_a_loop_that_reads_its_loss_at_the_end(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler, logs_late=True)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=told.append):
        loop.run(".FFFF")
    assert [each.cause for each in told] == ["forward"]


def test_a_healthy_loop_is_told_nothing(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=lambda each: pytest.fail(str(each))) as watch:
        loop.run("....F..F....")
    assert watch.diagnosis is None


@pytest.mark.parametrize("story", [".FFFF..F.FFF..", "FFFFFF", "......"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SCALERS)
def test_the_loop_goes_on_bit_for_bit(name: str, story: str, fused: bool) -> None:
    def run(around: Callable[[Loop], AbstractContextManager[Any]]) -> Any:
        loop = Loop(SCALERS[name](), fused=fused)
        with around(loop), warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)
            loop.run(story)
        return loop.left()

    expected = run(lambda loop: nullcontext())
    assert same_state(run(lambda loop: diagnose_skips(loop.scaler, model=loop.model, after=2)), expected)


def test_two_scalers_at_once(scaler: torch.amp.GradScaler) -> None:
    other = SCALERS["torch"]()
    loops = Loop(scaler), Loop(other)
    told: dict[str, list[Diagnosis]] = {"mine": [], "other": []}
    with (
        diagnose_skips(scaler, model=loops[0].model, after=2, on_diagnosis=told["mine"].append),
        diagnose_skips(other, model=loops[1].model, after=2, on_diagnosis=told["other"].append),
    ):
        for mine, others in zip("FFFF..", "......", strict=True):
            loops[0].run(mine)
            loops[1].run(others)
        assert ([is_found(each) for each in told["mine"]], told["other"]) == ([True], [])
        loops[1].run("FFF")
    assert [is_found(each) for each in told["other"]] == [True]


def test_two_scalers_that_skip_together_are_told_one_after_the_other() -> None:
    loops = [Loop(SCALERS["torch"]()) for _ in range(2)]
    told: list[list[Diagnosis]] = [[], []]
    with (
        diagnose_skips(loops[0].scaler, model=loops[0].model, after=2, on_diagnosis=told[0].append),
        diagnose_skips(loops[1].scaler, model=loops[1].model, after=2, on_diagnosis=told[1].append),
    ):
        for _ in range(6):
            for loop in loops:
                loop.run("F")
    assert [len(each) for each in told] == [1, 1]


def test_contexts_within_each_other(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    told: list[str] = []
    with diagnose_skips(scaler, model=loop.model, after=4, on_diagnosis=lambda each: told.append("outer")):
        with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=lambda each: told.append("inner")):
            loop.run("FFFFFF")
        assert told == ["inner", "outer"]
        assert vars(type(scaler))["update"] is not ORIGINALS[type(scaler)]
        loop.run(".FFFFF")
    assert told == ["inner", "outer", "outer"]


def test_contexts_that_end_in_the_order_in_which_they_began(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    told: list[str] = []
    first = diagnose_skips(scaler, model=loop.model, after=1, on_diagnosis=lambda each: told.append("first"))
    second = diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=lambda each: told.append("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    loop.run("FFF")
    second.__exit__(None, None, None)
    assert told == ["second"]


def test_a_subclass_is_as_it_was_afterwards() -> None:
    class Own(torch.amp.GradScaler):
        pass

    scaler = Own("cpu", init_scale=64.0)
    loop = Loop(scaler)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=1, on_diagnosis=told.append):
        loop.run("FF")
    assert "update" not in vars(Own)
    assert [is_found(each) for each in told] == [True]


def test_the_scaler_can_be_pickled_meanwhile(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=lambda each: None):
        loop.run("F")
        copy = pickle.loads(pickle.dumps(scaler))
        assert copy.state_dict() == scaler.state_dict()
        loop.run("FF")
    assert type(copy) is type(scaler)
    copy.scale(torch.ones(()))
    copy.update(8.0)
    assert copy.get_scale() == 8.0


@pytest.mark.parametrize("story", ["", "F", "FF", "FFF"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_loop_passes_through(scaler: torch.amp.GradScaler, error: type[BaseException], story: str) -> None:
    loop = Loop(scaler)

    def broken() -> None:
        with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=lambda each: None):
            loop.run(story)
            raise error("in the loop")

    with pytest.raises(error, match="in the loop"):
        broken()
    loop.run(".")


def test_a_loop_that_ends_before_the_next_step_is_told_nothing(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=told.append):
        loop.run("FF")
    assert told == []


def test_an_exception_in_on_diagnosis_passes_through(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)

    def fails(diagnosis: Diagnosis) -> None:
        raise ValueError("in on_diagnosis")

    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=fails):
        loop.run("FF")
        with pytest.raises(ValueError, match="in on_diagnosis"):
            loop.run("F")
        loop.optimizer.zero_grad()


def test_a_warning_that_is_an_error_comes_after_the_update(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    with diagnose_skips(scaler, model=loop.model, after=2):
        loop.run("FF")
        before = scaler.get_scale()
        with pytest.raises(HalfstepWarning, match="Diagnosis: forward"):
            loop.run("F")
    assert scaler.get_scale() == before / 2


def test_a_loop_that_is_traced_already_goes_on(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    told: list[Diagnosis] = []
    with diagnose_skips(scaler, model=loop.model, after=2, on_diagnosis=told.append):
        with halfstep.trace(loop.model):
            loop.run("FFFF")
        assert told == []
        loop.run("FF")
    assert [is_found(each) for each in told] == [True]


def test_a_scaler_that_has_skipped_before(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    told: list[Diagnosis] = []
    loop.run("F")
    with diagnose_skips(scaler, model=loop.model, after=3, on_diagnosis=told.append):
        loop.run("FFFF.")
    assert [is_found(each) for each in told] == [True]


def test_what_does_not_happen_again_is_said_so(scaler: torch.amp.GradScaler) -> None:
    loop = Loop(scaler)
    with (
        diagnose_skips(scaler, model=loop.model, after=2),
        pytest.warns(HalfstepWarning, match=r"^2 steps in a row were skipped\. When the step was looked into, nothing was infinite"),
    ):
        loop.run("FF.")


class Summed(nn.Module):
    """A loss that is a module's last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x).float().square().mean() * 0.0).log()
        return loss


def test_a_loss_that_is_infinite_is_no_matter_of_its_gradient(scaler: torch.amp.GradScaler) -> None:
    model = Summed()
    told: list[Diagnosis] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose_skips(scaler, model=model, after=1, on_diagnosis=told.append):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(3, 4))
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
    (diagnosis,) = told
    assert diagnosis.origin is not None
    assert (diagnosis.cause, diagnosis.origin.op) == ("forward", "aten.log.default")


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"scaler": 3}, InvalidTypeError, r"diagnose_skips\(scaler\) takes a torch.amp.GradScaler or a halfstep.LossScaler, not a int"),
        ({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, ConfigurationError, "the scaler is disabled, so it skips nothing"),
        ({"model": "net"}, InvalidTypeError, r"diagnose_skips\(model=...\) takes a torch.nn.Module, not a str"),
        ({"after": 0}, ConfigurationError, r"diagnose_skips\(after=0\): the number of skips in a row is 1 or more"),
        ({"after": 1.5}, InvalidTypeError, r"diagnose_skips\(after=...\) takes a whole number, not 1.5"),
        ({"after": True}, InvalidTypeError, "takes a whole number, not True"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    given: Any = {"scaler": SCALERS["torch"](), "model": nn.Linear(1, 1), **settings}
    with pytest.raises(error, match=match):
        diagnose_skips(given.pop("scaler"), **given)
