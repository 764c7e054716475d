"""A load that fails changes nothing: the run goes on as if it had not been tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from halfstep import MixedPrecision
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.errors import CheckpointError, DamagedCheckpointError, HalfstepWarning, StepOrderError
from halfstep.randomness import seed_everything
from tests.checkpoint.cases import engine, fp16_fused, gan, known_end, loop, mlp, scaler
from tests.checkpoint.runs import Build, Run, state, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(path: Path, make: Build, *, error: type[BaseException], match: str, strict: bool = True) -> None:
    """Makes sure that a checkpoint is refused by a run in training, which goes on as its twin does that never tried to load one."""
    seed_everything(7)
    run = make()
    trained(run, 0, 4)
    before = state(run)
    with pytest.raises(error, match=match):
        load_checkpoint(path, run.engines, strict=strict)
    assert state(run) == before
    seed_everything(7)
    twin = make()
    trained(twin, 0, 4)
    expected = trained(twin, 4, 12)
    assert state(twin) != before
    seed_everything(7)
    again = make()
    trained(again, 0, 4)
    with pytest.raises(error):
        load_checkpoint(path, again.engines, strict=strict)
    assert trained(again, 4, 12) == expected
    assert state(again) == state(twin)


def saved(make: Build, folder: Path, *, steps: int = 7) -> Path:
    seed_everything(3)
    run = make()
    trained(run, 0, steps)
    return save_checkpoint(folder / "saved.pt", run.engines, step=steps)


def plainly(make: Callable[[], nn.Module] = mlp, precision: str = "fp16", **settings: Any) -> Build:
    def made() -> Run:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return loop(engine(model, optimizer, precision, scheduler=lr_scheduler.ExponentialLR(optimizer, 0.9), **settings))

    return made


class Raises(nn.Module):
    """Fails when it is half loaded, in one of the ways in which a module of the user's own can."""

    fails = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.count = 0
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        assert isinstance(self.table, Tensor)
        self.table.add_(1)
        return self.inner(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        if self.fails == "extra state":
            raise LookupError("No such state, says the module.")

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fails == "parameters":
            raise KeyError("No such parameter, says the module.")


def failing(fails: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Build:
    def made() -> Run:
        module = Raises()
        run = plainly(lambda: nn.Sequential(nn.Linear(6, 8), module, nn.Linear(8, 1)), **settings)()
        monkeypatch.setattr(Raises, "fails", fails)
        return run

    return made


@pytest.mark.parametrize("way", ["extra state", "parameters"])
def test_a_module_that_raises(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(failing("", monkeypatch), tmp_path)
    refused(path, failing(way, monkeypatch), error=LookupError, match="says the module")


def test_a_hook_that_raises(tmp_path: Path) -> None:
    def made(hook: Callable[..., None]) -> Build:
        def make() -> Run:
            run = plainly()()
            assert isinstance(run.engines, MixedPrecision)
            last: Any = run.engines.model.get_submodule("4")
            last.register_load_state_dict_post_hook(hook)
            return run

        return make

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("The hook divides.")

    path = saved(made(lambda *_: None), tmp_path)
    refused(path, made(fail), error=ZeroDivisionError, match="The hook divides")


class Migrates(nn.Module):
    """Takes a state without a version for one of an older kind."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("version") is None:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_what_is_put_back_is_no_older_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(fails: str) -> Build:
        def make() -> Run:
            run = plainly(lambda: nn.Sequential(Migrates(), Raises(), nn.Linear(8, 1)))()
            monkeypatch.setattr(Raises, "fails", fails)
            return run

        return make

    path = saved(made(""), tmp_path)
    refused(path, made("extra state"), error=LookupError, match="says the module")


def test_a_version_is_kept(tmp_path: Path) -> None:
    make = plainly(lambda: nn.Sequential(Migrates(), nn.Linear(8, 1)))
    path = saved(make, tmp_path)
    run = make()
    load_checkpoint(path, run.engines)
    assert isinstance(run.engines, MixedPrecision)
    assert torch.equal(run.engines.model.state_dict()["0.weight"], torch.load(path, weights_only=True)["model"]["0.weight"])


class Failing(lr_scheduler.ExponentialLR):
    fails = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            raise ArithmeticError("The schedule cannot.")


class Refusing(torch.optim.SGD):
    fails = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            raise ArithmeticError("The optimizer cannot.")


def several() -> Run:
    """Two optimizers and two schedules, the second of which may fail."""
    model = mlp()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01, fused=True)
    second = Refusing(model[1:].parameters(), lr=0.1, momentum=0.9)
    schedules = [lr_scheduler.CosineAnnealingLR(first, 9), Failing(second, 0.9)]
    return loop(engine(model, [first, second], "fp16", scheduler=schedules))


@pytest.mark.parametrize(("kind", "match"), [(Failing, "The schedule cannot"), (Refusing, "The optimizer cannot")])
def test_a_part_that_raises_after_others_were_loaded(kind: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(several, tmp_path)
    monkeypatch.setattr(kind, "fails", True)
    refused(path, several, error=CheckpointError, match=rf"cannot be loaded into that of this run: ArithmeticError: {match}\. Nothing")


def test_the_second_of_two_engines_does_not_fit(tmp_path: Path) -> None:
    def pair(kind: Any) -> Build:
        def made() -> Run:
            shared = scaler()
            one, two = mlp(), mlp()
            first = engine(one, torch.optim.AdamW(one.parameters(), lr=0.01), "fp16", scaler=shared)
            second = engine(two, kind(two.parameters(), lr=0.01), "fp16", scaler=shared)
            steps = [loop(first).step, loop(second).step]
            return Run(engines={"one": first, "two": second}, step=lambda number: (*steps[0](number), *steps[1](number)))

        return made

    path = saved(pair(torch.optim.AdamW), tmp_path, steps=3)
    refused(path, pair(torch.optim.SGD), error=CheckpointError, match=r"The two\.optimizer was saved of a AdamW, and this run has a SGD")


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    def other() -> Run:
        return plainly(scaler=scaler(growth_interval=7))()

    path = saved(plainly(scaler=None), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HalfstepWarning)
        warnings.filterwarnings("ignore", "fp16 on this CPU is emulated", HalfstepWarning)
        refused(path, other, error=HalfstepWarning, match="keeps the settings of this run")


MISFITS: dict[str, tuple[Build, str]] = {
    "another model": (plainly(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))), "is another one"),
    "another shape": (
        plainly(lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 1))),
        r"0\.weight has the shape \(8, 6\) in the checkpoint, and \(9, 6\)",
    ),
    "another optimizer": (
        lambda: loop(engine(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), "fp16")),
        "saved of a AdamW, and this run has a SGD",
    ),
    "no schedule": (
        lambda: loop(engine(model := mlp(), torch.optim.AdamW(model.parameters()), "fp16")),
        "scheduler ExponentialLR, and this run has none",
    ),
    "engines with names": (gan, "other engines: a single one without a name"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_run_that_it_does_not_fit(name: str, tmp_path: Path) -> None:
    make, match = MISFITS[name]
    refused(saved(plainly(), tmp_path), make, error=CheckpointError, match=match)


def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    path = saved(known_end, tmp_path, steps=3)
    refused(path, known_end, error=StepOrderError, match=r"after 1 of accumulate=3 micro-batches, whose gradients would be lost")


@pytest.mark.parametrize("part", ["nothing", "a folder", "empty", "text", "torch", "first", "middle", "last", "cut"])
def test_what_is_no_whole_checkpoint(part: str, tmp_path: Path) -> None:
    path = saved(fp16_fused, tmp_path)
    content = bytearray(path.read_bytes())
    place = {"first": 5, "middle": len(content) // 2, "last": len(content) - 1}.get(part)
    path.unlink()
    if part == "a folder":
        path.mkdir()
    elif part == "torch":
        torch.save({"model": {}}, path)
    elif part == "cut":
        path.write_bytes(content[:-1000])
    elif place is not None:
        content[place] ^= 1
        path.write_bytes(content)
    elif part != "nothing":
        path.write_bytes(b"" if part == "empty" else b"step 7\n")
    error = CheckpointError if part == "nothing" else DamagedCheckpointError
    refused(path, fp16_fused, error=error, match=str(path))


class Expanded(nn.Module):
    """A buffer that nobody can write to."""

    shift: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 1)
        self.register_buffer("shift", torch.full((1,), value).expand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.shift.sum()  # type: ignore[no-any-return]


def test_a_buffer_that_nobody_can_write_to(tmp_path: Path) -> None:
    path = saved(plainly(lambda: Expanded(1.0)), tmp_path)
    load_checkpoint(path, plainly(lambda: Expanded(1.0))().engines)
    refused(path, plainly(lambda: Expanded(2.0)), error=CheckpointError, match=r"model\.shift is expanded memory in this model")


def test_what_is_taken_from_a_load_is_the_runs_own(tmp_path: Path) -> None:
    path = saved(fp16_fused, tmp_path)
    run = fp16_fused()
    info = load_checkpoint(path, run.engines)
    trained(run, 7, 20)
    path.write_bytes(bytes(len(path.read_bytes())))  # The file, which was mapped, is no part of the run.
    twin = state(run)
    assert (info.step, info.extra, info.path, info.record.step) == (7, {}, path, 7)
    assert state(run) == twin


def test_the_optimizers_of_a_run_stay_the_same_objects(tmp_path: Path) -> None:
    path = saved(fp16_fused, tmp_path)
    run = fp16_fused()
    assert isinstance(run.engines, MixedPrecision)
    amp = run.engines
    optimizer, parameters = amp.optimizer, list(amp.model.parameters())
    load_checkpoint(path, amp)
    assert amp.optimizer is optimizer
    assert all(one is two for one, two in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert all(one is two for one, two in zip(amp.model.parameters(), parameters, strict=True))
