"""`halfstep report`, on runs that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep.monitor
from halfstep.cli import main
from halfstep.journal import Entry, RunWriter, SavedRun
from halfstep.records import Alert, RunSummaries, RunSummary
from tests.report import run_samples as samples


def saved(folder: Path, *entries: Entry) -> str:
    writer = RunWriter(folder)
    writer.write(entries or samples.complete(3))
    writer.close()
    return str(folder)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["report", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class TestExitCodes:
    @pytest.mark.parametrize(("severity", "code"), [("info", 0), ("warning", 1), ("error", 1)])
    def test_warnings_and_errors_are_findings(self, tmp_path: Path, severity: str, code: int) -> None:
        assert run(saved(tmp_path / "x", *samples.complete(3), samples.alert(severity=severity))) == code

    def test_one_of_several_runs_may_have_them(self, tmp_path: Path) -> None:
        fine, bad = saved(tmp_path / "x"), saved(tmp_path / "y", samples.step(1), samples.alert())
        assert run(fine) == 0
        assert run(fine, bad) == 1

    def test_a_run_that_is_not_there_cannot_be_shown(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(saved(tmp_path / "x"), str(tmp_path / "none")) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert f"There is no run at {tmp_path / 'none'}" in output.err

    def test_a_file_that_holds_no_run_cannot_be_shown(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "run.jsonl").write_text("not a run\n")
        assert run(str(tmp_path)) == 2
        assert "holds no run" in capsys.readouterr().err

    def test_no_run_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run() == 2
        assert "RUN..." in capsys.readouterr().err


class TestFoldersOfRuns:
    def test_they_are_listed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("b", "a"):
            saved(tmp_path / name)
        (tmp_path / "empty").mkdir()
        assert run(str(tmp_path)) == 2
        assert capsys.readouterr().err == (
            f"halfstep: {tmp_path} is no run, but holds 2 folders of runs: a, b. Name one or several of them, such as {tmp_path}/b, "
            f"or all: halfstep report {tmp_path}/*\n"
        )

    def test_of_many_the_last_are_listed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for number in range(12):
            saved(tmp_path / f"run-{number:02d}", samples.start())
        assert run(str(tmp_path)) == 2
        error = capsys.readouterr().err
        assert "12 folders of runs, the last 10 of which are run-02, run-03" in error
        assert "run-01" not in error

    def test_a_run_in_a_folder_with_runs_is_shown(self, tmp_path: Path) -> None:
        saved(tmp_path)
        saved(tmp_path / "below", samples.step(1), samples.alert())
        assert run(str(tmp_path)) == 0


class TestOutput:
    def test_it_is_printed_with_the_conclusion_last(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(saved(tmp_path / "x", *samples.complete(3), samples.alert())) == 1
        output = capsys.readouterr()
        assert output.err == ""
        assert output.out.splitlines()[0] == "Training run: x"
        assert output.out.splitlines()[-1].startswith("3 steps in fp16, none skipped; 1 alert, loss_spike at step 2")
        assert "Part by part" in output.out

    def test_the_file_in_the_folder_may_be_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(f"{saved(tmp_path / 'x')}/run.jsonl") == 0
        assert capsys.readouterr().out.startswith("Training run: x\n")

    def test_json_of_one_run_stands_alone_on_standard_output(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(saved(tmp_path / "x", *samples.complete(3), samples.alert()), "--json", "-") == 1
        output = capsys.readouterr()
        summary = RunSummary.from_json(output.out)
        assert (summary.schema, summary.name, summary.steps, summary.alerts) == (1, "x", 3, (samples.alert(),))
        assert "Training run: x" in output.err

    def test_json_of_several_runs_holds_them_in_their_order(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(saved(tmp_path / "y"), saved(tmp_path / "x"), "--json", "-") == 0
        assert [one.name for one in RunSummaries.from_json(capsys.readouterr().out).runs] == ["y", "x"]

    def test_files_are_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page, numbers = tmp_path / "report.html", tmp_path / "report.json"
        assert run(saved(tmp_path / "x"), "--html", str(page), "--json", str(numbers)) == 0
        assert json.loads(numbers.read_text())["steps"] == 3
        assert "<h1>x</h1>" in page.read_text()
        assert capsys.readouterr().err == f"Measurements: {numbers}\nReport: {page}\n"

    def test_files_that_cannot_be_written_are_refused_first(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(str(tmp_path / "none"), "--html", str(tmp_path / "no" / "report.html")) == 2
        assert "there is no folder" in capsys.readouterr().err


class TestRules:
    @pytest.fixture
    def judge(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Stands in for the rules: it finds one thing, and says so of each run."""
        judged: list[int] = []

        def judge_run(one: SavedRun) -> tuple[Alert, ...]:
            judged.append(len(one.steps))
            return (samples.alert("skip_rate", 1),)

        monkeypatch.setattr(halfstep.monitor, "judge_run", judge_run)
        return judged

    def test_without_the_option_the_recorded_alerts_are_shown(self, tmp_path: Path, judge: list[int]) -> None:
        assert run(saved(tmp_path / "x")) == 0
        assert judge == []

    def test_with_the_option_the_steps_are_judged_anew(self, tmp_path: Path, judge: list[int], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(saved(tmp_path / "x", *samples.complete(3), samples.alert()), "--rules", "--json", "-") == 1
        output = capsys.readouterr()
        summary = RunSummary.from_json(output.out)
        assert judge == [3]
        assert [alert.rule for alert in summary.alerts] == ["skip_rate"]
        assert summary.recorded_alerts == (samples.alert(),)
        assert "Only now: skip_rate at step 1" in output.err
        assert "Only when it ran: loss_spike at step 2" in output.err


def test_a_real_process_reports_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was loaded')\n")
    words = [sys.executable, "-m", "halfstep", "report", saved(tmp_path / "x"), "--rules", "--html", str(tmp_path / "report.html")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, f"Report: {tmp_path / 'report.html'}\n")
    assert done.stdout.endswith("3 steps in fp16, none skipped; no alerts.\n")
