"""`halfstep diagnose`, with a diagnosis that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halfstep.cli import main
from halfstep.errors import TaskError
from halfstep.records import CAUSES, Cause, Diagnosis
from tests.report import diagnosis_samples as samples


class Calls(list[dict[str, Any]]):
    """What `halfstep.diagnosis.diagnose` was called with, and what it gives back."""

    result: Diagnosis | BaseException

    def __call__(self, task: str, **options: Any) -> Diagnosis:
        self.append({"task": task, **options})
        options["progress"](1, 2, "training")
        print("what a task prints")  # noqa: T201
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for the diagnosis itself, so that nothing runs."""
    calls = Calls()
    calls.result = samples.diagnosis("healthy")
    module: Any = ModuleType("halfstep.diagnosis")
    module.diagnose = calls
    monkeypatch.setitem(sys.modules, "halfstep.diagnosis", module)
    return calls


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class TestArguments:
    def test_what_is_not_named_has_its_default(self, diagnose: Calls) -> None:
        assert run("a.py:task") == 0
        (call,) = diagnose
        assert callable(call.pop("progress"))
        assert call == {
            "task": "a.py:task",
            "precision": "fp16",
            "target": None,
            "max_steps": 100,
            "loss_scale": "dynamic",
            "seed": 0,
            "device": "auto",
        }

    @pytest.mark.parametrize(
        ("words", "name", "value"),
        [
            (("--precision", "fp16; head=fp32"), "precision", "fp16; head=fp32"),
            (("--target", "cuda"), "target", "cuda"),
            (("--max-steps", "1"), "max_steps", 1),
            (("--loss-scale", "none"), "loss_scale", "none"),
            (("--loss-scale", "dynamic"), "loss_scale", "dynamic"),
            (("--loss-scale", "1024"), "loss_scale", 1024.0),
            (("--loss-scale", "0.5"), "loss_scale", 0.5),
            (("--seed", "7"), "seed", 7),
            (("--device", "cuda:1"), "device", "cuda:1"),
        ],
    )
    def test_what_is_named_is_passed_on(self, diagnose: Calls, words: tuple[str, ...], name: str, value: object) -> None:
        assert run("a.py:task", *words) == 0
        assert diagnose[0][name] == value
        assert type(diagnose[0][name]) is type(value)

    @pytest.mark.parametrize("scale", ["", "0", "-1", "inf", "nan", "static", "Dynamic"])
    def test_a_wrong_scale_is_refused_before_anything_runs(self, diagnose: Calls, capsys: pytest.CaptureFixture[str], scale: str) -> None:
        assert run("a.py:task", f"--loss-scale={scale}") == 2
        assert capsys.readouterr().err == (
            f"halfstep: --loss-scale {scale!r} is neither dynamic, none nor a positive number, such as 1024.\n"
        )
        assert not diagnose

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "Missing argument 'TASK'"),
            (("a.py:task", "--max-steps", "0"), "Invalid value for '--max-steps': 0 is not in the range x>=1"),
            (("a.py:task", "--seed", "-1"), "Invalid value for '--seed': -1 is not in the range"),
            (("a.py:task", "--json", "no/such/folder/a.json"), "there is no folder"),
            (("a.py:task", "--html", "-"), "--html - is not supported"),
        ],
    )
    def test_wrong_usage_runs_nothing(
        self, diagnose: Calls, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
    ) -> None:
        assert run(*words) == 2
        assert message in capsys.readouterr().err
        assert not diagnose


class TestResult:
    @pytest.mark.parametrize("cause", CAUSES)
    def test_a_cause_is_a_finding(self, diagnose: Calls, capsys: pytest.CaptureFixture[str], cause: Cause) -> None:
        diagnose.result = samples.diagnosis(cause)
        assert run("a.py:task") == (0 if cause == "healthy" else 1)
        assert "Diagnosis: examples/digits.py:task" in capsys.readouterr().out

    def test_a_step_that_fails_only_once_is_a_finding(self, diagnose: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        diagnose.result = samples.diagnosis("healthy", is_reproduced=False)
        assert run("a.py:task") == 1
        assert "did not fail again when it was replayed" in capsys.readouterr().out

    @pytest.mark.parametrize("cause", ["healthy", "forward"])
    def test_interrupted(self, diagnose: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: Cause) -> None:
        diagnose.result = samples.diagnosis(cause, interrupted=True)
        out = tmp_path / "a.json"
        assert run("a.py:task", "--json", str(out)) == 130
        assert Diagnosis.from_json(out.read_text(encoding="utf-8")).interrupted
        assert "The diagnosis was interrupted" in capsys.readouterr().out

    def test_an_error_of_the_task(self, diagnose: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        diagnose.result = TaskError("There is no file 'a.py'.")
        assert run("a.py:task") == 2
        assert "halfstep: There is no file 'a.py'." in capsys.readouterr().err

    def test_files(self, diagnose: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        diagnose.result = samples.full_diagnosis()
        out, page = tmp_path / "a.json", tmp_path / "a.html"
        assert run("a.py:task", "--json", str(out), "--html", str(page)) == 1
        assert Diagnosis.from_json(out.read_text(encoding="utf-8")) == samples.full_diagnosis()
        assert "scores = q @ k.mT" in page.read_text(encoding="utf-8")
        assert "> 12 |     scores = q @ k.mT" in capsys.readouterr().out

    def test_json_alone_on_standard_output(self, diagnose: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        diagnose.result = samples.full_diagnosis()
        assert run("a.py:task", "--json", "-") == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["cause"] == "forward"
        assert "what a task prints" in err
        assert "What to do" in err


class TestHelp:
    def test_it_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--help") == 0
        out = " ".join(capsys.readouterr().out.split())
        for option in ("precision", "target", "max-steps", "loss-scale", "seed", "device", "json", "html"):
            assert f"--{option}" in out
        for part in (
            "trained until a step is skipped",
            "replayed under a trace",
            "a remedy is tried",
            "parameters, buffers and random numbers are put back",
            "halfstep diagnose train.py:task --target cuda",
            "Exit codes: 0 nothing is wrong, 1 something is, 2 it could not run, 130 Ctrl-C.",
        ):
            assert part in out

    def test_it_is_in_the_list_of_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "diagnose Find the operation that breaks a training step" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("words", [["--help"], ["a.py:task", "--loss-scale", "x"], ["a.py:task", "--json", "no/such/folder/a.json"]])
    def test_it_loads_no_torch(self, words: list[str]) -> None:
        statement = f"from halfstep.cli import main; main({['diagnose', *words]!r})"
        program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nsys.exit(3 if 'torch' in sys.modules else 4)"
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False).returncode == 4
