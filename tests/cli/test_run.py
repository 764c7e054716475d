"""`halfstep run`: its words, in this process, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import halfstep.watching
from halfstep.cli import main
from halfstep.errors import ConfigurationError
from halfstep.watching.scripts import Script

TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4) * (1e30 if step == 1 else 1)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
print(sys.argv, __name__, optimizer.step.__name__)
raise ValueError("at the end")
"""


class FakeWatch:
    """What `halfstep.watching.watch` was called with, and what happened to what it gave."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.seen: list[str] = []

    def __call__(self, log_dir: object, **options: Any) -> FakeWatch:
        self.calls.append({"log_dir": log_dir, **options})
        return self

    def __enter__(self) -> FakeWatch:
        self.seen.append("entered")
        return self

    def __exit__(self, *error: object) -> None:
        self.seen.append("left")

    def summary(self) -> str:
        self.seen.append("summary")
        return "3 steps, none skipped, no alert."


class Launches(list[tuple[Script, Callable[[], AbstractContextManager[object]]]]):
    """What the launcher was given."""

    def __call__(self, script: Script, *, watcher: Callable[[], AbstractContextManager[object]], begins_after: str) -> None:
        assert begins_after == "torch"
        self.append((script, watcher))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWatch:
    """Stands in for the watch; the current folder has a train.py."""
    fake = FakeWatch()
    # Not by setattr, which would look at the real one first, and load torch.
    monkeypatch.setitem(vars(halfstep.watching), "watch", fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "train.py").touch()
    return fake


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Stands in for the launcher: no script runs in this process."""
    calls = Launches()
    monkeypatch.setattr(sys.modules["halfstep.cli.run"], "run_script", calls)
    return calls


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class TestWords:
    @pytest.mark.parametrize(
        ("words", "script"),
        [
            ("train.py", Script(target="train.py")),
            ("train.py --log-dir x --quiet -h -m y", Script(target="train.py", arguments=("--log-dir", "x", "--quiet", "-h", "-m", "y"))),
            ("--quiet -- train.py -- --bogus", Script(target="train.py", arguments=("--", "--bogus"))),
            ("- --x", Script(target="-", arguments=("--x",))),
            ("-m json.tool --sink x", Script(target="json.tool", arguments=("--sink", "x"), is_module=True)),
            ("--quiet -m json -m", Script(target="json", arguments=("-m",), is_module=True)),
        ],
    )
    def test_what_follows_on_the_script_is_the_script_s(self, watch: FakeWatch, launches: Launches, words: str, script: Script) -> None:
        assert run(*words.split()) == 0
        assert [each for each, _ in launches] == [script]

    def test_what_is_not_named_has_its_default(self, watch: FakeWatch, launches: Launches) -> None:
        run("train.py", "--run", "my run")
        launches[0][1]()
        assert watch.calls == [
            {
                "log_dir": None,
                "sinks": ("jsonl", "alerts"),
                "on_persistent_skips": None,
                "diagnose": False,
                "command": "train.py --run 'my run'",
            }
        ]

    @pytest.mark.parametrize(
        ("words", "name", "value"),
        [
            ("--log-dir d/e", "log_dir", "d/e"),
            ("--diagnose", "diagnose", True),
            ("--quiet", "sinks", ("jsonl",)),
            ("--sink csv --sink tensorboard", "sinks", ("jsonl", "alerts", "csv", "tensorboard")),
            ("--sink console --sink jsonl", "sinks", ("jsonl", "console")),
            ("--sink console --quiet --sink csv --sink alerts", "sinks", ("jsonl", "csv")),
            ("--on-persistent-skips warn", "on_persistent_skips", "warn"),
            ("--on-persistent-skips raise", "on_persistent_skips", "raise"),
            ("--on-persistent-skips save-and-stop", "on_persistent_skips", "save_and_stop"),
            ("--on-persistent-skips fall-back", "on_persistent_skips", "fall_back"),
        ],
    )
    def test_what_is_named_is_passed_on(self, watch: FakeWatch, launches: Launches, words: str, name: str, value: object) -> None:
        run(*words.split(), "train.py")
        launches[0][1]()
        assert watch.calls[0][name] == value

    def test_the_folder_of_a_module_may_be_named(self, watch: FakeWatch, launches: Launches) -> None:
        run("-m", "json.tool")
        launches[0][1]()
        assert watch.calls[0]["log_dir"] is None
        run("--log-dir", "mine", "-m", "json.tool")
        launches[1][1]()
        assert watch.calls[1]["log_dir"] == "mine"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("", "Missing argument 'SCRIPT|-m MODULE'"),
            ("-m", "Missing argument 'SCRIPT|-m MODULE'"),
            ("--bogus train.py", "No such option '--bogus'"),
            ("--on-persistent-skips stop train.py", "'stop' is not one of 'warn', 'raise', 'save-and-stop', 'fall-back'"),
            ("trian.py", "halfstep: There is no 'trian.py' to run in "),
            ("-m no_such_thing.train", "halfstep: There is no module 'no_such_thing' for -m no_such_thing.train."),
        ],
    )
    def test_what_cannot_run(
        self, watch: FakeWatch, launches: Launches, capsys: pytest.CaptureFixture[str], words: str, message: str
    ) -> None:
        assert run(*words.split()) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert not out
        assert not launches

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--help") == 0
        shown = capsys.readouterr().out
        for word in ("-m", "--log-dir", "--diagnose", "--sink", "--on-persistent-skips", "--quiet", "torchrun", "halfstep report"):
            assert word in shown


class TestSummary:
    def test_it_comes_last_on_standard_error(self, watch: FakeWatch, launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
        run("train.py")
        with pytest.raises(KeyboardInterrupt), launches[0][1]():
            raise KeyboardInterrupt
        assert watch.seen == ["entered", "left", "summary"]
        assert capsys.readouterr() == ("", "halfstep: 3 steps, none skipped, no alert.\n")

    @pytest.mark.parametrize(("words", "rank"), [(["--quiet"], "0"), ([], "1")])
    def test_where_there_is_none(
        self,
        watch: FakeWatch,
        launches: Launches,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        words: list[str],
        rank: str,
    ) -> None:
        monkeypatch.setenv("RANK", rank)
        run(*words, "train.py")
        with launches[0][1]():
            pass
        assert watch.seen == ["entered", "left"]
        assert capsys.readouterr() == ("", "")


class TestScript:
    """What a script raises leaves `main` as it is; what the command itself raises does not."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "full"), ConfigurationError("of the script"), SystemExit("text")])
    def test_nothing_stands_around_it(
        self, watch: FakeWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
    ) -> None:
        def script(script: Script, **options: object) -> None:
            raise error

        monkeypatch.setattr(sys.modules["halfstep.cli.run"], "run_script", script)
        with pytest.raises(type(error)) as info:
            main(["run", "train.py"])
        assert info.value is error
        assert error.__context__ is None
        assert capsys.readouterr() == ("", "")


def test_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = [[], ["-m", "halfstep", "run", "--log-dir", "the run"]]
    started = [
        subprocess.Popen(
            [sys.executable, *more, "train.py", "--log-dir", "x"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for more in words
    ]
    (out, err), (our_out, our_err) = (process.communicate(timeout=120) for process in started)
    assert [process.returncode for process in started] == [1, 1]
    assert our_out == out
    assert out.endswith("['train.py', '--log-dir', 'x'] __main__ step\n")
    lines = our_err.splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("halfstep")) == err
    assert err.endswith("\nValueError: at the end\n")
    assert [line for line in lines if "3 steps, 1 skipped" in line and line.endswith("halfstep report 'the run'\n")]
    entries = [json.loads(line) for line in (tmp_path / "the run" / "run.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries if entry["kind"] != "alert"] == ["run", "step", "step", "step", "run"]
    assert [entry["skipped"] for entry in entries if entry["kind"] == "step"] == [False, True, False]
    assert (entries[0]["command"], entries[-1]["outcome"]) == ("train.py --log-dir x", "ValueError")
