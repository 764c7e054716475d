"""A run that was stopped anywhere and gone on with is bit for bit the run that never stopped."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from halfstep import MixedPrecision
from halfstep.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from halfstep.errors import StepOrderError
from halfstep.randomness import seed_everything
from tests.checkpoint import killed_run
from tests.checkpoint.cases import FEW, INFINITE, WHOLE, Moving, build, engine, gan, loop, mlp, with_model
from tests.checkpoint.runs import STEPS, Facts, Run, batch, facts, state, sweep, trained

pytestmark = pytest.mark.usefixtures("one_thread")

_SOME = (0, 1, 5, 14, 24, 39, 40)

_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, getattr(torch.optim, "Muon", None))
]
_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda of: lr_scheduler.StepLR(of, 3),
    "steps": lambda of: lr_scheduler.MultiStepLR(of, [2, 5, 5]),
    "constant": lr_scheduler.ConstantLR,
    "linear": lr_scheduler.LinearLR,
    "exponential": lambda of: lr_scheduler.ExponentialLR(of, 0.9),
    "polynomial": lambda of: lr_scheduler.PolynomialLR(of, 10),
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 5),
    "restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 4),
    "cycles": lambda of: lr_scheduler.CyclicLR(of, 0.001, 0.01, step_size_up=3, mode="triangular2"),
    "cycles by a function": lambda of: lr_scheduler.CyclicLR(of, 0.001, 0.01, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "one cycle": lambda of: lr_scheduler.OneCycleLR(of, 0.05, total_steps=20, three_phase=True),
    "function": lambda of: lr_scheduler.LambdaLR(of, lambda epoch: 0.9**epoch),
    "factor": lambda of: lr_scheduler.MultiplicativeLR(of, lambda epoch: 0.95),
    "chained": lambda of: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(of), lr_scheduler.ExponentialLR(of, 0.9)], of),
    "averaged": lambda of: SWALR(of, swa_lr=0.001, anneal_epochs=5),
}


def skips(said: list[Facts]) -> list[int]:
    """At which micro-batches a step was skipped."""
    return [number for number, each in enumerate(said) if len(each) > 2 and each[2] == "True"]


@pytest.mark.parametrize("name", WHOLE)
def test_stopped_after_any_number_of_steps(name: str, tmp_path: Path) -> None:
    said = sweep(build(name), at=range(STEPS + 1), folder=tmp_path)
    assert len(skips(said)) >= 3
    assert skips(said)[0] < 15
    assert skips(said)[-1] > 24


@pytest.mark.parametrize("name", FEW)
def test_stopped_after_some_steps(name: str, tmp_path: Path) -> None:
    said = sweep(build(name), at=_SOME, folder=tmp_path)
    assert bool(skips(said)) is (name not in ("sparse", "fixed scale")), skips(said)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_every_optimizer(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    def made() -> Run:
        model = mlp()
        return loop(engine(model, kind(model.parameters(), lr=0.01), "bf16", accumulate=2), infinite=(3,))  # type: ignore[call-arg]

    assert skips(sweep(made, at=(0, 1, 4, 7), folder=tmp_path, steps=12)) == [3]


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", _SCHEDULES)
def test_every_schedule(name: str, rate: Any, tmp_path: Path) -> None:
    def made() -> Run:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(rate), momentum=0.9)
        return loop(engine(model, optimizer, "bf16", scheduler=_SCHEDULES[name](optimizer)))

    said = sweep(made, at=(0, 1, 4, 6, 11), folder=tmp_path, steps=14)
    assert len({each[6] for each in said}) > 1


def test_gradients_that_are_sparse_and_their_optimizer(tmp_path: Path) -> None:
    def made() -> Run:
        words, head = nn.Embedding(20, 5, sparse=True), nn.Linear(5, 1)
        model = nn.ModuleDict({"words": words, "head": head})
        optimizers = [torch.optim.SparseAdam(words.parameters(), lr=0.01), torch.optim.Adam(head.parameters(), lr=0.01)]
        amp = engine(model, optimizers, "bf16", accumulate=3, max_grad_norm=None)

        def step(number: int) -> Facts:
            x, y = batch(number)
            with amp.autocast():
                loss = F.mse_loss(head(words((x.abs() * 7).long() % 20).sum(1)), y)
            amp.backward(loss)
            return facts(loss, amp.step())

        return Run(engines=amp, step=step)

    sweep(made, at=range(13), folder=tmp_path, steps=12)


def test_between_two_engines_that_share_a_scaler(tmp_path: Path) -> None:
    run = gan()
    assert not isinstance(run.engines, MixedPrecision)
    amp = run.engines["discriminator"]
    trained(run, 0, 2)
    before = save_checkpoint(tmp_path / "before.pt", run.engines, step=2)
    with amp.autocast():
        loss = amp.model(torch.ones(4, 1)).mean()
    amp.backward(loss)
    amp.step()
    with pytest.raises(StepOrderError, match="1 of the 2 engines that share a loss scaler have stepped"):
        save_checkpoint(tmp_path / "between.pt", run.engines, step=2)
    assert list(tmp_path.iterdir()) == [before]


def test_between_unscaling_and_the_step(tmp_path: Path) -> None:
    amp = engine(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    with amp.autocast():
        loss = model(torch.ones(4, 6)).mean()
    amp.backward(loss)
    amp.unscale_gradients()
    with pytest.raises(StepOrderError, match=r"between unscale_gradients\(\) and step\(\)"):
        save_checkpoint(tmp_path / "between.pt", amp, step=2)
    assert amp.step() is not None
    save_checkpoint(tmp_path / "between.pt", amp, step=2)


def test_saved_by_what_is_called_after_each_step(tmp_path: Path) -> None:
    def made(saves: bool) -> tuple[Run, Checkpointer]:
        def save() -> None:
            if saves:
                checkpointer.save(amp.state_dict()["steps"])

        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        amp = engine(model, optimizer, "fp16", scheduler=schedule, on_step=save)
        checkpointer = Checkpointer(tmp_path, amp=amp, keep=None)
        return loop(amp), checkpointer

    seed_everything(0)
    run, checkpointer = made(saves=True)
    said, end = trained(run, 0, 12), state(run)
    taken = [number + 1 for number in range(12) if number not in skips(said)]
    assert [path.name for path in reversed(checkpointer.checkpoints())] == [f"step-{step:08d}.pt" for step in taken]
    for step in taken:
        seed_everything(step)
        resumed, _ = made(saves=False)
        load_checkpoint(tmp_path / f"step-{step:08d}.pt", resumed.engines)
        assert trained(resumed, step, 12) == said[step:]
        assert state(resumed) == end


def test_an_average_and_the_position_in_the_data_are_kept_beside_it(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randn(24, 1))

    def made() -> tuple[MixedPrecision, nn.Module, torch.Generator]:
        model = nn.Linear(6, 1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = engine(model, optimizer, "bf16", on_step=lambda: average.update_parameters(model))
        return amp, average, torch.Generator().manual_seed(5)

    def epoch(amp: MixedPrecision, order: torch.Generator) -> None:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order):
            amp.train_step(lambda x, y: F.mse_loss(amp.model(x), y), x, y)

    amp, average, order = made()
    epoch(amp, order)
    path = save_checkpoint(tmp_path / "one.pt", amp, step=1, extra={"average": average.state_dict(), "order": order.get_state()})
    epoch(amp, order)
    resumed, other, again = made()
    info = load_checkpoint(path, resumed)
    other.load_state_dict(info.extra["average"])
    again.set_state(info.extra["order"])
    epoch(resumed, again)
    assert torch.equal(amp.model.weight, resumed.model.weight)  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(average.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_model_that_has_its_shapes_by_its_first_batch(tmp_path: Path) -> None:
    def made() -> Run:
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 1))
        model(torch.ones(2, 6))
        return loop(engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), "bf16", accumulate=3), infinite=INFINITE)

    assert skips(sweep(made, at=range(13), folder=tmp_path, steps=14)) == [5, 11]


def test_a_buffer_that_is_in_no_state_is_as_it_was(tmp_path: Path) -> None:
    made = with_model(Moving, accumulate=1)
    assert skips(sweep(made, at=range(9), folder=tmp_path, steps=10)) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(("killed_at", "background"), [(7, "foreground"), (16, "background")])
def test_a_process_that_was_killed(killed_at: int, background: str, tmp_path: Path) -> None:
    end = killed_run.end_of()
    words = [sys.executable, "-m", "tests.checkpoint.killed_run", str(tmp_path / "run"), background, str(killed_at)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = process.stdout.readline()
        reached = process.stdout.readline()
        process.kill()
    assert (begun, reached) == ("begins at 0\n", f"reached {killed_at}\n")
    resumed = subprocess.run([*words[:-1], "-1"], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    start = int(resumed[0].removeprefix("begins at "))
    # In the background the last one may not have been on disk yet.
    assert start in ((killed_at,) if background == "foreground" else (killed_at - 1, killed_at))
    assert resumed[1:] == [f"ends as {end}"]
