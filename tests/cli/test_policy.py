"""`halfstep policy show`, with real tasks, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.cli import main
from halfstep.records import PolicyEffect
from tests.cli.tasks import SQUARE, write_task

# The model of the task is one layer; here it is a body and a head.
TWO = f"""
{SQUARE}
def task(seed):
    model = nn.Sequential()
    model.body, model.head = nn.Linear(4, 4), nn.Linear(4, 2)
    return halfstep.Task(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, batches=[torch.randn(8, 4)]
    )
"""


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """What is run here is tiny."""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["policy", "show", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def task(tmp_path: Path) -> str:
    return write_task(tmp_path, TWO)


@pytest.mark.parametrize(
    ("policy", "code", "conclusion"),
    [
        ("bf16", 0, "The policy has no overrides: all modules run in bf16."),
        (
            "bf16; head=fp32",
            0,
            "Every override has an effect: 1 of 3 modules run by an override (1 in fp32), with 33 % of the parameters; a step makes 7 "
            "casts, 2 fewer than without overrides.",
        ),
        ("O2", 0, "No override is about a module of this model: all modules run in fp16."),
        ("bf16; torch.nn.LayerNorm=fp32; op:linear=fp32", 0, "Every override whose class the model has has an effect: "),
        (
            "bf16; hed=fp32",
            1,
            "hed=fp32 has no effect: it matches no module of this Sequential, so the policy cannot be applied as it is. Did you mean "
            "'head'?",
        ),
        ("bf16; class:X*=fp32", 1, "class:X*=fp32 has no effect: it matches no module of this Sequential, "),
        ("bf16; op:softmax=fp32", 1, "op:softmax=fp32 has no effect: the operation was not called where autocast is on."),
        ("bf16; head=fp32; hed=fp32; head=fp16", 1, "2 of 3 overrides have no effect: head=fp32 and hed=fp32."),
    ],
)
def test_an_override_without_an_effect_is_a_finding(
    capsys: pytest.CaptureFixture[str], task: str, policy: str, code: int, conclusion: str
) -> None:
    assert run(policy, task, "--device", "cpu") == code
    out, err = capsys.readouterr()
    assert conclusion in out.splitlines()[-1]
    assert not err


def test_the_tables_say_what_runs_how_and_why(capsys: pytest.CaptureFixture[str], task: str) -> None:
    run("bf16; head=fp32", task, "--device", "cpu")
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["body", "Linear", "bf16", "default", "20", "1"] in rows
    assert ["head", "Linear", "fp32", "head=fp32", "10", "1"] in rows
    assert any(row[:6] == ["head=fp32", "1", "10", "1", "of", "1"] and row[6].lstrip("-−") == "2" for row in rows)  # noqa: RUF001


def test_a_file_is_read_and_what_was_found_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_task(tmp_path, TWO.replace("    model = nn.Sequential()", "    assert seed == 3\n    model = nn.Sequential()"))
    file, json_file, html_file = tmp_path / "islands.toml", tmp_path / "a.json", tmp_path / "a.html"
    file.write_text('default = "bf16"\n[[override]]\nmodule = "head"\nprecision = "fp32"\n')
    assert run(str(file), task, "--device", "cpu", "--seed", "3", "--json", str(json_file), "--html", str(html_file)) == 0
    effect = PolicyEffect.from_json(json_file.read_text())
    assert (effect.name, effect.policy, effect.task) == ("islands", "bf16; head=fp32", task)
    assert [module.precision for module in effect.modules] == ["bf16", "bf16", "fp32"]
    assert "<h1>bf16; head=fp32</h1>" in html_file.read_text()
    assert capsys.readouterr().err == f"Measurements: {json_file}\nReport: {html_file}\n"


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("bf16", write_task(tmp_path, f"print('loading'){TWO}"), "--device", "cpu", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["default"] == "bf16"
    assert "loading" in err
    assert "all modules run in bf16" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fp61", "TASK"], "Unknown precision 'fp61'"),
        (["nowhere.toml", "TASK"], "Cannot read the policy nowhere.toml: No such file or directory."),
        (["bf16; op:sofmax=fp32", "TASK"], "the operation aten.sofmax, which torch does not have"),
        (["bf16", "nowhere.py:task"], "There is no file 'nowhere.py'"),
        (["bf16", "TASK", "--device", "gpu"], "Unknown device 'gpu'"),
        (["bf16", "TASK", "--seed", "-1"], "Invalid value for '--seed'"),
        (["bf16", "TASK", "--html", "-"], "Name a file"),
        (["bf16", "TASK", "--json", "no/such/folder/a.json"], "there is no folder no/such/folder"),
        (["bf16"], "Missing argument 'TASK'"),
        (["TASK", "bf16; head=fp32"], "is no policy, but 'bf16; head=fp32' is one: the policy comes first, then the task."),
    ],
)
def test_what_could_not_run(capsys: pytest.CaptureFixture[str], task: str, words: list[str], message: str) -> None:
    assert run(*(task if word == "TASK" else word for word in words)) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_a_class_that_the_model_lacks_is_told_and_is_no_finding(capsys: pytest.CaptureFixture[str], task: str) -> None:
    assert run("bf16; torch.nn.Conv2d=fp32", task, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "torch.nn.Conv2d=fp32: The model has no module of this class. That is no fault: a policy may serve many models." in out


def test_a_policy_of_the_command_line_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, task: str) -> None:
    file = tmp_path / "islands.toml"
    file.write_text("bf16; head=fp32")
    assert run(str(file), task) == 2
    err = capsys.readouterr().err
    assert "in the form for command lines and Policy.parse, 'bf16; head=fp32'. A file holds it as TOML:" in err
    assert err.endswith('\n\ndefault = "bf16"\n\n[[override]]\nmodule = "head"\nprecision = "fp32"\n')


def test_a_loss_that_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("bf16", write_task(tmp_path, "loss = lambda model, batch: undefined"), "--device", "cpu") == 2
    assert "A step under the policy 'bf16' failed: NameError: name 'undefined' is not defined (" in capsys.readouterr().err


def test_help_shows_both_forms_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "'fp16; decoder.*.attn=fp32; torch.nn.LayerNorm=fp32; op:softmax=fp32'" in out
    for line in ('default = "fp16"', "[[override]]", 'module = "decoder.*.attn"', 'class = "torch.nn.LayerNorm"', 'op = "softmax"'):
        assert line in out
    assert "1 an override has no effect" in out
    words = " ".join(out.split())
    assert "A class of torch's that the model lacks is no such case" in words
    assert "A class of your own is written class:package.Name, or class:Name." in words
