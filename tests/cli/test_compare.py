from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.cli import main
from halfstep.errors import ConfigurationError
from halfstep.records import Comparison
from tests import samples
from tests.cli.tasks import SQUARE, write_task

ESCAPE = "\x1b"


class Calls(list[dict[str, Any]]):
    """What `halfstep.compare` was called with, and what it gives back."""

    result: Comparison | BaseException

    def __call__(self, task: str, **options: Any) -> Comparison:
        self.append({"task": task, **options})
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for the comparison itself, so that nothing runs."""
    calls = Calls()
    calls.result = samples.comparison()
    monkeypatch.setattr(halfstep, "compare", calls, raising=False)
    return calls


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class TestArguments:
    def test_what_is_not_named_has_its_default(self, compare: Calls) -> None:
        assert run("a.py:task") == 0
        (call,) = compare
        assert callable(call.pop("progress"))
        assert call == {
            "task": "a.py:task",
            "precisions": ["fp32", "bf16", "fp16"],
            "policies": [],
            "steps": 12,
            "warmup": 2,
            "seeds": 3,
            "device": "auto",
            "channels_last": False,
            "compile": False,
            "loss_scale": "dynamic",
            "max_slowdown": 10.0,
            "target": None,
        }

    @pytest.mark.parametrize(
        ("words", "name", "value"),
        [
            ("--precisions bf16", "precisions", ["bf16"]),
            ("--precisions fp32,fp16", "precisions", ["fp32", "fp16"]),
            ("--steps 7", "steps", 7),
            ("--warmup 1", "warmup", 1),
            ("--seeds 1", "seeds", 1),
            ("--seeds 7,11,13", "seeds", [7, 11, 13]),
            ("--seeds 7,", "seeds", [7]),
            ("--seeds 0,4294967295", "seeds", [0, 2**32 - 1]),
            ("--device cuda:1", "device", "cuda:1"),
            ("--channels-last", "channels_last", True),
            ("--compile", "compile", True),
            ("--loss-scale none", "loss_scale", "none"),
            ("--max-slowdown 2.5", "max_slowdown", 2.5),
            ("--max-slowdown inf", "max_slowdown", float("inf")),
            ("--target cuda", "target", "cuda"),
        ],
    )
    def test_what_is_named_is_passed_on(self, compare: Calls, words: str, name: str, value: object) -> None:
        assert run("a.py:task", *words.split()) == 0
        assert compare[0][name] == value

    def test_policies_are_passed_on_in_their_order(self, compare: Calls) -> None:
        assert run("a.py:task", "--policy", "b.toml", "--policy", "fp16; head=fp32") == 0
        assert compare[0]["policies"] == ["b.toml", "fp16; head=fp32"]

    def test_blanks_in_a_list_of_precisions(self, compare: Calls) -> None:
        run("a.py:task", "--precisions", " fp32, bf16 ")
        assert compare[0]["precisions"] == ["fp32", "bf16"]

    @pytest.mark.parametrize("seeds", ["", ",", "x", "1.5", "0", "-1", "1,1", "1,-1", "1,4294967296", "1;2"])
    def test_wrong_seeds_are_refused_before_anything_runs(self, compare: Calls, capsys: pytest.CaptureFixture[str], seeds: str) -> None:
        assert run("a.py:task", f"--seeds={seeds}") == 2
        assert not compare
        err = capsys.readouterr().err
        assert err == (
            f"halfstep: --seeds {seeds!r} is neither a number of seeds, such as 3, nor a list of different seeds from 0 to 2**32 - 1, "
            "such as 7,11,13.\n"
        )


class TestExitCodes:
    def judged(self, parity: Any) -> Comparison:
        return samples.comparison(verdicts=(samples.verdict("bf16", loss_parity=parity), samples.verdict("fp16")))

    @pytest.mark.parametrize(("parity", "code"), [("same", 0), ("better", 0), ("inconclusive", 0), ("worse", 1)])
    def test_training_that_is_worse_is_a_finding(self, compare: Calls, parity: str, code: int) -> None:
        compare.result = self.judged(parity)
        assert run("a.py:task") == code

    @pytest.mark.parametrize(("outcome", "code"), [("complete", 0), ("stopped", 0), ("failed", 1)])
    def test_a_precision_that_fails_is_a_finding(self, compare: Calls, outcome: Any, code: int) -> None:
        sample = samples.comparison()
        compare.result = replace(sample, runs=(*sample.runs[:2], replace(sample.runs[2], outcome=outcome)))
        assert run("a.py:task") == code

    def test_ctrl_c_comes_first(self, compare: Calls) -> None:
        compare.result = replace(self.judged("worse"), interrupted=True)
        assert run("a.py:task") == 130


class TestOutput:
    def test_the_table_goes_to_standard_output(self, compare: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        run("a.py:task")
        out, err = capsys.readouterr()
        assert samples.comparison().conclusion in out
        assert ESCAPE not in out
        assert not err

    def test_files(self, compare: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
        assert run("a.py:task", "--json", str(json_file), "--html", str(html_file)) == 0
        assert Comparison.from_json(json_file.read_text()) == samples.comparison()
        assert json_file.read_text().endswith("}\n")
        assert html_file.read_text().lstrip().lower().startswith("<!doctype html>")
        assert capsys.readouterr().err == f"Measurements: {json_file}\nReport: {html_file}\n"

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_json_on_standard_output_is_alone_there(self, compare: Calls, capsys: pytest.CaptureFixture[str], interrupted: bool) -> None:
        compare.result = samples.comparison(interrupted=interrupted)
        assert run("a.py:task", "--json", "-") == (130 if interrupted else 0)
        out, err = capsys.readouterr()
        assert Comparison.from_json(out) == compare.result
        assert compare.result.conclusion in err

    def test_long_json_lines_are_not_wrapped(self, compare: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        compare.result = samples.comparison(conclusion=f"[bold]{'very ' * 200}long[/bold] :smile:")
        run("a.py:task", "--json", "-")
        assert Comparison.from_json(capsys.readouterr().out).conclusion == compare.result.conclusion

    def test_what_is_printed_is_not_lost_with_a_file_that_fails(
        self, compare: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def full(path: Path, text: str) -> None:
            raise ConfigurationError(f"Cannot write {path}: No space left on device.")

        monkeypatch.setattr(sys.modules["halfstep.cli.outputs"], "write_text", full)
        assert run("a.py:task", "--json", str(tmp_path / "a.json")) == 2
        out, err = capsys.readouterr()
        assert samples.comparison().conclusion in out
        assert "No space left on device" in err
        assert "Measurements" not in err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--json", "no/such/folder/a.json"], "there is no folder no/such/folder. Make it first."),
            (["--html", "no/such/folder/a.html"], "there is no folder no/such/folder. Make it first."),
            (["--json", "."], "it is a folder"),
            (["--html", "-"], "Name a file"),
            (["--json", "a", "--html", "a"], "--json and --html both name a; one would overwrite the other"),
            (["--json", "a", "--html", "./a"], "--json and --html both name"),
        ],
    )
    def test_what_cannot_be_written_is_refused_before_anything_runs(
        self, compare: Calls, capsys: pytest.CaptureFixture[str], words: list[str], message: str
    ) -> None:
        assert run("a.py:task", *words) == 2
        assert not compare
        assert message in capsys.readouterr().err

    def test_a_device_takes_both_files_and_stays_a_device(self, compare: Calls) -> None:
        assert run("a.py:task", "--json", os.devnull, "--html", os.devnull) == 0
        assert len(compare) == 1
        assert Path(os.devnull).is_char_device()

    def test_no_progress_bar_where_no_terminal_is(self, compare: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        shown = StringIO()
        monkeypatch.setattr(sys, "stderr", shown)
        run("a.py:task")
        compare[0]["progress"](1, 2, "fp32, seed 0")
        assert shown.getvalue() == ""


class TestTasks:
    """Real tasks, run in this process."""

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("loss = lambda model, batch: model(batch)", "must be a scalar tensor, not one of shape (8, 2)"),
            ("loss = lambda model, batch: 1.0", "must be a scalar tensor, not a float"),
            ("loss = lambda model, batch: undefined", "fp32 failed in step 1: NameError: name 'undefined' is not defined ("),
            ("loss = lambda model, batch: sys.exit(0)", "fp32 failed in step 1: SystemExit: 0 ("),
            ("task = lambda seed: {}", "returned {} (type dict); it must return a halfstep.Task"),
            ("task = 3", "not a factory"),
            ("del task", "has no factory named 'task'"),
            ("1 / 0", "could not be imported: ZeroDivisionError"),
            (
                f"{SQUARE}\nmade = task\ndef task(seed):\n    import dataclasses\n    return dataclasses.replace(made(seed), batches=[])",
                "has no batches",
            ),
        ],
    )
    def test_a_task_that_cannot_run(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, message: str) -> None:
        assert run(write_task(tmp_path, source), "--device", "cpu") == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.startswith("halfstep: ")
        assert "Traceback" not in err
        assert not out

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nowhere.py:task", "There is no file 'nowhere.py'"),
            ("small", "names no factory"),
            ("no_such_module:task", "There is no module 'no_such_module'"),
        ],
    )
    def test_a_name_that_stands_for_nothing(self, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
        assert run(name) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--precisions fp61", "Unknown precision 'fp61'. Allowed are fp32, bf16 and fp16. Did you mean 'fp16'?"),
            ("--precisions fp32,", "Unknown precision ''. Allowed are fp32, bf16 and fp16."),
            ("--policy=nowhere.toml", "Cannot read the policy nowhere.toml: No such file or directory."),
            ("--policy=fp61", "Unknown precision 'fp61'. Allowed are auto, fp32, bf16 and fp16. Did you mean 'fp16'?"),
            ("--device gpu", "Unknown device 'gpu'. Allowed are auto, cpu, cuda and cuda:N."),
        ],
    )
    def test_wrong_values(self, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
        assert run("small.py:task", *words.split()) == 2
        assert capsys.readouterr().err == f"halfstep: {message}\n"

    def test_a_precision_that_fails(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        source = "def loss(model, batch):\n    assert precision() != 'fp16', 'no half here'\n    return model(batch).square().mean()"
        words = ["--steps", "1", "--seeds", "1", "--device", "cpu", "--precisions", "fp16"]
        assert run(write_task(tmp_path, source), *words) == 1
        assert "fp16 did not run to the end (fp16 failed in step 1: AssertionError: no half here" in capsys.readouterr().out

    def test_a_policy_is_a_column(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "islands.toml"
        file.write_text('default = "bf16"\n[[override]]\nclass = "torch.nn.Linear"\nprecision = "fp32"\n')
        words = ["--steps", "1", "--seeds", "1", "--device", "cpu", "--precisions", "fp32", "--policy", str(file), "--json", "-"]
        assert run(write_task(tmp_path), *words) == 0
        comparison = Comparison.from_json(capsys.readouterr().out)
        assert [each.precision for each in comparison.runs] == ["fp32", "islands"]
        assert [each.precision for each in comparison.verdicts] == ["islands"]
        (effect,) = comparison.policies
        assert (effect.name, effect.policy) == ("islands", "bf16; torch.nn.Linear=fp32")

    def test_a_rehearsal(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
        words = ["--steps", "2", "--target", "cuda", "--policy", "fp16; op:linear=fp32", "--json", str(json_file), "--html", str(html_file)]
        assert run(write_task(tmp_path), *words) == 0
        comparison = Comparison.from_json(json_file.read_text())
        assert (comparison.target, comparison.device.type) == ("cuda", "cpu")
        assert [each.step_time_ms for each in comparison.runs] == [None] * 4
        out = " ".join(capsys.readouterr().out.split())
        for shown in (out, html_file.read_text()):
            assert comparison.conclusion in shown
            assert "on cuda (rehearsed on this CPU)" in shown
            assert "The numerics of cuda were rehearsed on a CPU; time and memory were not measured." in shown
        assert not any(word in out for word in ("emulated", "slow", "fast", "Step time", "Peak memory", "Samples/s", "Speed-up"))

    def test_a_rehearsal_in_which_fp16_overflows(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        source = "def loss(model, batch):\n    return (model(batch * 1e6) * 1e-6).square().mean()"
        assert run(write_task(tmp_path, source), "--steps", "4", "--target", "cuda") == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "; 18 of 18 steps were skipped; time and memory were not measured." in out
        assert "; fp16 trains worse than fp32; time and memory were not measured." in out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--target cdua", "The lists of autocast are known for cuda, cpu, xpu, mtia and maia, not for 'cdua'. Did you mean 'cuda'?"),
            ("--target cuda --device cuda", "the numerics of cuda are rehearsed on a CPU. Leave device out"),
            ("--target cuda --compile", "what is compiled cannot be rehearsed. Leave compile out"),
        ],
    )
    def test_what_cannot_be_rehearsed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, message: str) -> None:
        assert run(write_task(tmp_path, "loss = lambda model, batch: sys.exit(7)"), *words.split()) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert not out

    def test_what_the_task_prints_stays_out_of_the_json(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        source = f"print('loading')\n{SQUARE}"
        words = ["--steps", "1", "--seeds", "1", "--device", "cpu", "--precisions", "fp32", "--json", "-"]
        assert run(write_task(tmp_path, source), *words) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["runs"][0]["precision"] == "fp32"
        assert "loading" in err
