"""`halfstep diagnose` from its words to its exit code, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.cli import main
from halfstep.records import Diagnosis
from tests.cli.tasks import SQUARE, write_task

BROKEN = """
def loss(model, batch):
    return (model(batch) * 1e6).float().log_softmax(-1).mean()  # here: breaks
"""

RAISING = """
def loss(model, batch):
    raise ValueError("no such column")
"""

STOPPED = """
def loss(model, batch):
    raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """What is run here is tiny."""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def read(path: Path) -> Diagnosis:
    return Diagnosis.from_json(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("target", ["cuda", "xpu"])
def test_a_broken_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    out, page = tmp_path / "diagnosis.json", tmp_path / "diagnosis.html"
    task = write_task(tmp_path, BROKEN)
    assert run("diagnose", task, "--target", target, "--json", str(out), "--html", str(page)) == 1
    diagnosis = read(out)
    assert (diagnosis.cause, diagnosis.target, diagnosis.task, diagnosis.precision) == ("forward", target, task, "fp16")
    assert diagnosis.origin is not None
    assert diagnosis.origin.op == "aten.mul.Tensor"
    (line,) = (each for each in diagnosis.excerpt if each.is_marked)
    assert line.text.endswith("# here: breaks")
    html = page.read_text(encoding="utf-8")
    assert "aten.mul.Tensor" in html
    assert "# here: breaks" in html
    shown = " ".join(capsys.readouterr().out.split())
    assert "aten.mul.Tensor" in shown
    assert "small.py" in shown


def test_a_healthy_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "diagnosis.json"
    words = ("--target", "cuda", "--loss-scale", "256", "--max-steps", "4", "--json", str(out))
    assert run("diagnose", write_task(tmp_path, SQUARE), *words) == 0
    diagnosis = read(out)
    assert (diagnosis.cause, diagnosis.steps, diagnosis.skips, diagnosis.scale) == ("healthy", 4, 0, 256.0)
    assert "4 steps" in " ".join(capsys.readouterr().out.split())


def test_json_alone_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--precision", "bf16", "--json", "-", "--max-steps", "2", "--device", "cpu")
    assert run("diagnose", write_task(tmp_path, SQUARE), *words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["cause"], plain["target"], plain["precision"], plain["steps"]) == ("healthy", "", "bf16", 2)


@pytest.mark.parametrize("steps", [1, 3])
def test_so_many_steps_at_most(tmp_path: Path, steps: int) -> None:
    out = tmp_path / "diagnosis.json"
    words = ("--target", "cuda", "--loss-scale", "none", "--max-steps", str(steps), "--json", str(out))
    run("diagnose", write_task(tmp_path, SQUARE), *words)
    assert read(out).steps == steps


def test_the_first_scale(tmp_path: Path) -> None:
    out = tmp_path / "diagnosis.json"
    words = ("--target", "cuda", "--loss-scale", "1e12", "--max-steps", "3", "--json", str(out))
    assert run("diagnose", write_task(tmp_path, SQUARE), *words) == 1
    diagnosis = read(out)
    assert (diagnosis.cause, diagnosis.scale) == ("scale", 1e12)
    assert diagnosis.verified


def test_a_policy_in_a_file(tmp_path: Path) -> None:
    policy, out = tmp_path / "policy.toml", tmp_path / "diagnosis.json"
    policy.write_text('default = "bf16"\n', encoding="utf-8")
    words = ("--target", "cuda", "--precision", str(policy), "--max-steps", "2", "--json", str(out))
    assert run("diagnose", write_task(tmp_path, BROKEN), *words) == 0
    assert read(out).precision == "bf16"


def test_ctrl_c_leaves_what_was_known(tmp_path: Path) -> None:
    out = tmp_path / "diagnosis.json"
    assert run("diagnose", write_task(tmp_path, STOPPED), "--target", "cuda", "--json", str(out)) == 130
    diagnosis = read(out)
    assert (diagnosis.interrupted, diagnosis.cause, diagnosis.steps) == (True, "healthy", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "tpu"), "known for cuda, cpu, xpu, mtia and maia"),
        (("--target", "cuda", "--device", "cuda"), "does not go with it"),
        (("--precision", "fp8"), "Unknown precision 'fp8'"),
        (("--loss-scale", "big"), "--loss-scale 'big' is neither dynamic, none nor a positive number"),
        (("--loss-scale", "0"), "nor a positive number"),
        (("--loss-scale", "inf"), "nor a positive number"),
        (("--max-steps", "0"), "--max-steps"),
        (("--seed", "-1"), "--seed"),
        (("--html", "nosuch/folder/page.html"), "nosuch"),
    ],
)
def test_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert run("diagnose", write_task(tmp_path, SQUARE), *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_task_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", write_task(tmp_path, RAISING), "--target", "cuda") == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "ValueError: no such column" in shown
    assert "in loss" in shown


def test_a_task_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", f"{tmp_path}/nosuch.py:task") == 2
    assert "There is no file" in capsys.readouterr().err
