from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
import pytest

import halfstep
from halfstep.cli import main
from halfstep.cli.main import command
from halfstep.errors import ConfigurationError, TaskError


def run(*words: str) -> int:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`halfstep fail` raises what it is given."""

    def fail_with(error: BaseException) -> None:
        def callback() -> None:
            raise error

        monkeypatch.setitem(command.commands, "fail", click.Command("fail", callback=callback))

    return fail_with


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert run(option) == 0
    out, err = capsys.readouterr()
    assert "Exit codes: 0 all is well, 1 there are findings, 2 it could not run, 130 Ctrl-C." in out
    listed = " ".join(out.split())
    assert "compare Measure fp32 against bf16 and fp16" in listed
    assert "policy Show what a policy does to a task" in listed
    assert not err


def test_every_subcommand_is_listed_and_is_called_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(command.commands) == {"audit", "compare", "diagnose", "inspect", "lint", "ops", "policy", "report", "run"}
    assert all(subcommand.name == name for name, subcommand in command.commands.items())
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.commands)


@pytest.mark.parametrize(("words", "others"), [(["lint", "--help"], ["run", "compare"]), (["--version"], ["lint", "run", "compare"])])
def test_other_subcommands_are_not_loaded(words: list[str], others: list[str]) -> None:
    program = f"import sys\nfrom halfstep.cli import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass\n"
    program += f"assert not [name for name in {others} if f'halfstep.cli.{{name}}' in sys.modules]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_compare_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "--help") == 0
    out = capsys.readouterr().out
    for option in (
        "precisions",
        "policy",
        "steps",
        "warmup",
        "seeds",
        "device",
        "channels-last",
        "compile",
        "loss-scale",
        "max-slowdown",
        "json",
        "html",
    ):
        assert f"--{option}" in out
    assert "path/to/file.py:task" in out


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert run(option) == 0
    assert capsys.readouterr().out == f"halfstep {halfstep.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bogus"], "No such option '--bogus'"),
        (["comparee"], "No such command 'comparee'"),
        (["lnit"], "lint"),
        (["compare"], "Missing argument 'TASK'"),
        (["compare", "a.py:task", "--step"], "Did you mean"),
        (["compare", "a.py:task", "--steps", "many"], "'many' is not a valid integer range"),
        (["compare", "a.py:task", "--steps", "0"], "Invalid value for '--steps': 0 is not in the range x>=1"),
        (["compare", "a.py:task", "--warmup", "0"], "Invalid value for '--warmup': 0 is not in the range x>=1"),
        (["compare", "a.py:task", "--max-slowdown", "1"], "Invalid value for '--max-slowdown': 1.0 is not in the range x>1"),
        (["compare", "a.py:task", "--loss-scale", "static"], "'static' is not one of 'dynamic', 'none'"),
    ],
)
def test_wrong_usage_could_not_run(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
    assert "Traceback" not in err


class TestErrors:
    def test_a_mistake_by_the_user_is_one_line(self, capsys: pytest.CaptureFixture[str], failing: Any) -> None:
        error = ConfigurationError("Unknown thing 'x'. Allowed are y and z.")
        error.__cause__ = ValueError("x")
        failing(error)
        assert run("fail") == 2
        assert capsys.readouterr() == ("", "halfstep: Unknown thing 'x'. Allowed are y and z.\n")

    def test_an_error_in_the_task_says_how_to_see_more(self, capsys: pytest.CaptureFixture[str], failing: Any) -> None:
        error = TaskError("fp32 failed in step 1: KeyError: 'x' (task.py:3, in loss)")
        error.__cause__ = KeyError("x")
        failing(error)
        assert run("fail") == 2
        assert capsys.readouterr().err == f"halfstep: {error}\nFor the whole traceback: halfstep --traceback ...\n"

    def test_without_a_cause_there_is_no_more_to_see(self, capsys: pytest.CaptureFixture[str], failing: Any) -> None:
        failing(TaskError("There is no file 'x.py'."))
        assert run("fail") == 2
        assert capsys.readouterr().err == "halfstep: There is no file 'x.py'.\n"

    def test_traceback(self, capsys: pytest.CaptureFixture[str], failing: Any) -> None:
        failing(TaskError("It broke."))
        assert run("--traceback", "fail") == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):")
        assert err.endswith("\nhalfstep: It broke.\n")

    def test_a_bug_in_halfstep_is_admitted(self, capsys: pytest.CaptureFixture[str], failing: Any) -> None:
        failing(RuntimeError("oh"))
        assert run("fail") == 2
        err = capsys.readouterr().err
        assert "RuntimeError: oh" in err
        assert err.endswith("halfstep: this is a bug in halfstep; please report it with the traceback above.\n")

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
    def test_ctrl_c_before_there_is_a_result(self, capsys: pytest.CaptureFixture[str], failing: Any, error: BaseException) -> None:
        failing(error)
        assert run("fail") == 130
        assert capsys.readouterr().err.endswith("halfstep: interrupted before there was a result.\n")


@pytest.mark.parametrize(
    "statement",
    [
        "import halfstep",
        "import halfstep.cli",
        "from halfstep.cli import main; main(['--help'])",
        "from halfstep.cli import main; main(['compare', '--help'])",
        "from halfstep.cli import main; main(['policy', 'show', '--help'])",
        "from halfstep.cli import main; main(['policy', 'show', 'bf16', 'a.py:task', '--json', 'no/such/folder/a.json'])",
        "from halfstep.cli import main; main(['compare', 'a.py:task', '--steps', '0'])",
        "from halfstep.cli import main; main(['compare', 'a.py:task', '--seeds', 'x'])",
        "from halfstep.cli import main; main(['compare', 'a.py:task', '--json', 'no/such/folder/a.json'])",
    ],
)
def test_no_torch_is_loaded_where_none_is_needed(statement: str) -> None:
    program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nsys.exit(3 if 'torch' in sys.modules else 4)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False).returncode == 4


def test_python_m_halfstep() -> None:
    done = subprocess.run([sys.executable, "-m", "halfstep", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"halfstep {halfstep.__version__}\n"


def test_a_full_disk_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "main", full)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "halfstep: cannot go on: [Errno 28] No space left on device\n"
