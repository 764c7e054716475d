"""`halfstep.diagnose`: what it is given, which step it finds, and what it leaves behind."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Policy, Task
from halfstep.errors import ConfigurationError, HalfstepError, InvalidTypeError, TaskError
from halfstep.records import Diagnosis
from tests.diagnosis.tasks import BREAKING, Net, diagnose, factored, factory, line_that_breaks, loss_of
from tests.engine.loops import same_state

INF = float("inf")
pytestmark = pytest.mark.usefixtures("one_thread")

BROKEN = factory(factored(BREAKING))
HEALTHY = factory(factored(1.0, 1.0))


def breaks(diagnosis: Diagnosis) -> bool:
    """Whether it is the fault of these tasks."""
    origin = diagnosis.origin
    assert origin is not None, diagnosis
    found = (diagnosis.cause, origin.op, origin.site.module, Path(origin.site.file).name, origin.site.line)
    return found == ("forward", "aten.mul.Tensor", "wide", "tasks.py", line_that_breaks())


class TestWhatItIsGiven:
    def test_a_factory(self) -> None:
        diagnosis = diagnose(BROKEN)
        assert breaks(diagnosis)
        assert diagnosis.task == "factory.<locals>.task"
        assert (diagnosis.step, diagnosis.steps, diagnosis.precision, diagnosis.target, diagnosis.device) == (1, 1, "fp16", "cuda", "cpu")
        assert [each.override for each in diagnosis.remedies if each.verified] == ["wide=fp32"]

    def test_the_name_of_a_task(self, tmp_path: Path) -> None:
        file = tmp_path / "named_task.py"
        file.write_text(
            "import torch, halfstep\n"
            "def task(seed):\n"
            "    model = torch.nn.Linear(4, 2)\n"
            "    return halfstep.Task(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),\n"
            "        loss=lambda model, x: (model(x) * 1e6).float().log_softmax(-1).mean(), batches=[torch.ones(3, 4)])\n"
        )
        diagnosis = diagnose(f"{file}:task")
        assert diagnosis.task == f"{file}:task"
        assert diagnosis.origin is not None
        assert (diagnosis.cause, diagnosis.origin.site.file, diagnosis.origin.site.line) == ("forward", str(file), 5)
        assert [each.number for each in diagnosis.excerpt if each.is_marked] == [5]

    def test_a_function_and_its_model(self) -> None:
        model = Net()
        ((batch),) = factored(BREAKING)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        diagnosis = diagnose(lambda: loss_of(model, batch), model=model, target="cuda")
        assert breaks(diagnosis)
        assert (diagnosis.step, diagnosis.steps) == (1, 1)
        assert same_state(model.state_dict(), before)
        assert all(each.grad is None for each in model.parameters())

    def test_a_function_and_a_task_count_alike(self) -> None:
        model = Net()
        ((batch),) = factored(BREAKING)
        diagnosis = diagnose(lambda: loss_of(model, batch), model=model, target="cuda")
        assert diagnosis.skips == diagnose(BROKEN).skips == 1

    def test_a_function_keeps_the_gradients_that_there_are(self) -> None:
        model = Net()
        ((batch),) = factored(BREAKING)
        loss_of(model, (batch[0], 1.0)).backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in model.parameters()]
        values = [None if each is None else each.clone() for each in gradients]
        diagnose(lambda: loss_of(model, batch), model=model, target="cuda")
        assert all(each.grad is before for each, before in zip(model.parameters(), gradients, strict=True))
        assert same_state([each.grad for each in model.parameters()], values)

    def test_a_function_whose_loss_scale_is_too_high(self) -> None:
        model = nn.Linear(4, 1)
        x = torch.ones(3, 4)
        diagnosis = diagnose(lambda: model(x).square().mean(), model=model, target="cuda", loss_scale=2.0**40)
        assert (diagnosis.cause, diagnosis.scale, diagnosis.skips) == ("scale", 2.0**40, 1)
        assert diagnosis.passing_scale is not None
        assert diagnosis.passing_scale < 2.0**20

    @pytest.mark.parametrize("precision", ["fp16", "fp16; head=fp32", Policy.parse("fp16; head=fp32"), "pure fp16", "toml"])
    def test_precisions(self, precision: Any, tmp_path: Path) -> None:
        if precision == "toml":
            precision = str(tmp_path / "policy.toml")
            Policy.parse("fp16; head=fp32").save(precision)
        diagnosis = diagnose(BROKEN, precision=precision)
        assert breaks(diagnosis)
        assert diagnosis.precision in ("fp16", "fp16; head=fp32", "pure fp16")
        assert diagnosis.verified

    @pytest.mark.parametrize("precision", ["bf16", "fp32", "auto", "fp16; wide=fp32", "pure bf16; head=fp32"])
    def test_precisions_in_which_it_does_not_break(self, precision: str) -> None:
        diagnosis = diagnose(BROKEN, precision=precision, loss_scale=64.0)
        assert (diagnosis.cause, diagnosis.is_finding, diagnosis.remedies) == ("healthy", False, ())

    @pytest.mark.parametrize("target", [None, "cuda", "xpu", "cpu"])
    def test_targets(self, target: str | None) -> None:
        diagnosis = diagnose(BROKEN, target=target)
        assert breaks(diagnosis)
        assert diagnosis.target == (target or "")

    @pytest.mark.parametrize(("loss_scale", "scale"), [("dynamic", 65536.0), ("none", 1.0), (1024.0, 1024.0), (2, 2.0), (2.0**-3, 0.125)])
    def test_loss_scales(self, loss_scale: Any, scale: float) -> None:
        for diagnosis in (diagnose(HEALTHY, loss_scale=loss_scale), diagnose(BROKEN, loss_scale=loss_scale)):
            assert diagnosis.scale == scale
            assert diagnosis.cause in ("healthy", "forward", "scale")

    def test_the_seed_makes_the_task(self) -> None:
        seeds: list[int] = []

        def made(seed: int) -> Task:
            seeds.append(seed)
            return HEALTHY(seed)

        diagnose(made, seed=7)
        assert seeds == [7]

    def test_progress(self) -> None:
        told: list[tuple[int, int, str]] = []
        diagnose(factory(factored(1.0, BREAKING)), max_steps=5, progress=lambda *each: told.append(each))
        assert told[0] == (0, 5, "step 1: training")
        assert told[-1][:2] == (1, 5)
        assert any(text == "step 2: a replay in fp32" for _, _, text in told)
        assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


class TestWhatItRefuses:
    @pytest.mark.parametrize(
        ("settings", "error", "match"),
        [
            ({"target": "tpu"}, ConfigurationError, "The lists of autocast are known for cuda, cpu, xpu, mtia and maia, not for 'tpu'"),
            ({"target": "cuda", "device": "cuda"}, ConfigurationError, "rehearsed on the CPU, so device='cuda' does not go with it"),
            ({"precision": "fp8"}, ConfigurationError, "Unknown precision 'fp8'. Allowed are auto, fp32, bf16 and fp16"),
            ({"precision": "fp16; nosuch=fp32"}, ConfigurationError, "The override 'nosuch=fp32' matches no module"),
            ({"precision": "nosuch.toml"}, ConfigurationError, "Cannot read the policy nosuch.toml"),
            ({"precision": 3}, InvalidTypeError, "A policy is a halfstep.Policy, the path of a TOML file, or a text"),
            ({"device": "tpu"}, ConfigurationError, "tpu"),
            ({"max_steps": 0}, ConfigurationError, r"diagnose\(max_steps=0\): at least one step has to be looked at"),
            ({"max_steps": 2.0}, InvalidTypeError, r"diagnose\(max_steps=...\) takes a whole number, not 2.0"),
            ({"max_steps": True}, InvalidTypeError, "takes a whole number, not True"),
            ({"loss_scale": "big"}, InvalidTypeError, "takes 'dynamic', 'none' or the first scale, not 'big'"),
            ({"loss_scale": True}, InvalidTypeError, "or the first scale, not True"),
            ({"loss_scale": None}, InvalidTypeError, "or the first scale, not None"),
            ({"loss_scale": 0}, ConfigurationError, "0.0 cannot be a loss scale"),
            ({"loss_scale": -2.0}, ConfigurationError, "-2.0 cannot be a loss scale"),
            ({"loss_scale": math.nan}, ConfigurationError, "nan cannot be a loss scale"),
            ({"loss_scale": INF}, ConfigurationError, "inf cannot be a loss scale"),
            ({"model": 3}, InvalidTypeError, r"diagnose\(model=...\) takes a torch.nn.Module, not a int"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            diagnose(HEALTHY, **settings)

    @pytest.mark.parametrize(("seed", "error"), [(-1, ConfigurationError), (2**32, ConfigurationError), ("a", InvalidTypeError)])
    def test_seeds(self, seed: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="seed"):
            diagnose(HEALTHY, seed=seed)

    @pytest.mark.parametrize(
        ("task", "error", "match"),
        [
            (3, InvalidTypeError, r"diagnose\(task\) takes a factory of tasks or the name of one, not a int"),
            (None, InvalidTypeError, "not a NoneType"),
            ("nosuch.py:task", TaskError, "There is no file 'nosuch.py'"),
            ("nosuch", TaskError, "'nosuch' names no factory"),
            (lambda seed: 1 / 0, TaskError, "failed with seed 0: ZeroDivisionError: division by zero .*test_diagnose.py"),
            (lambda seed: None, TaskError, "returned None; it must return a halfstep.Task"),
            (lambda: None, ConfigurationError, r"function of no arguments.*diagnose\(fn, model=model\)"),
            (sys.exit, TaskError, "The task could not be set up with seed 0: SystemExit: 0"),
            (factory([]), TaskError, r"The task has no batches: Task\(batches=...\) is empty"),
        ],
    )
    def test_tasks(self, task: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            diagnose(task)

    @pytest.mark.parametrize(
        ("loss", "error", "match"),
        [
            (lambda model, batch: 1 / 0, TaskError, "Step 1 failed.*: ZeroDivisionError: division by zero .*test_diagnose.py"),
            (lambda model, batch: model(*batch), ConfigurationError, r"The loss must be a scalar tensor, not one of shape \(6, 2\)"),
            (lambda model, batch: 1.0, InvalidTypeError, "The loss must be a scalar tensor, not a float"),
            (lambda model, batch: model(*batch).detach().sum(), ConfigurationError, "The loss needs no gradient"),
            (lambda model, batch: model(nothing=1), TaskError, "Step 1 failed.*: TypeError"),
        ],
    )
    def test_losses(self, loss: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            diagnose(factory(factored(1.0), loss=loss))

    def test_a_loss_that_raises_later(self) -> None:
        with pytest.raises(TaskError, match=r"^Step 3 failed: ValueError: bad batch .*in later\)$"):
            diagnose(factory(factored(1.0, 1.0, -1.0), loss=later), max_steps=9, loss_scale=64.0)

    @pytest.mark.parametrize(
        ("function", "error", "match"),
        [
            (3, InvalidTypeError, r"diagnose\(fn, model=...\) takes a function of no arguments that computes a loss, not 3"),
            ("train.py:task", InvalidTypeError, "computes a loss, not 'train.py:task'"),
            (lambda: 1 / 0, TaskError, "The function failed: ZeroDivisionError"),
            (lambda: torch.ones(3), ConfigurationError, r"not one of shape \(3,\)"),
            (lambda: 2.0, InvalidTypeError, "The loss must be a scalar tensor, not a float"),
        ],
    )
    def test_functions(self, function: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            diagnose(function, model=Net())

    @pytest.mark.parametrize("given", [HEALTHY, lambda: torch.ones(())], ids=["task", "function"])
    def test_nothing_stays_after_an_error(self, given: Callable[..., Any]) -> None:
        random_before = random.getstate(), torch.get_rng_state()
        with pytest.raises(HalfstepError):
            diagnose(factory(factored(1.0), loss=lambda model, batch: 1 / 0))  # type: ignore[arg-type, return-value]
        assert random.getstate() == random_before[0]
        assert torch.equal(torch.get_rng_state(), random_before[1])
        with halfstep.trace() as seen:
            torch.ones(2).half().mul(1e6)
        assert seen.origin is not None

    @pytest.mark.parametrize("precision", ["fp16; head=bf16", "pure fp16"])
    def test_a_model_with_a_policy_of_its_own_that_collides(self, precision: str) -> None:
        with pytest.raises(ConfigurationError, match=r"A policy is applied to this (Linear|Net) already\. Call remove\(\)"):
            diagnose(factory(factored(BREAKING), model=governed), precision=precision)

    @pytest.mark.parametrize("precision", ["fp16", "fp16; wide=fp32", "bf16"])
    def test_a_model_with_a_policy_of_its_own(self, precision: str) -> None:
        with pytest.raises(ConfigurationError, match="A policy is applied to"):
            diagnose(factory(factored(1.0), model=governed), precision=precision)


def governed() -> nn.Module:
    model = Net()
    Policy.parse("fp16; head=fp32").apply(model)
    return model


def later(model: Any, batch: Any) -> Tensor:
    if batch[1] < 0:
        raise ValueError("bad batch")
    return loss_of(model, batch)
