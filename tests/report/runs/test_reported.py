from __future__ import annotations

from pathlib import Path

from halfstep.records import RunSummaries, RunSummary
from halfstep.report.runs import reported_record, reported_runs
from tests.report import run_samples as samples


def test_a_single_run_has_the_colour_of_its_precision() -> None:
    assert samples.reported(samples.step(1)).role == "fp16"
    assert samples.reported(samples.step(1), samples.step(2, precision="bf16")).role == ""


def test_several_runs_have_colours_and_names_of_their_own(tmp_path: Path) -> None:
    places = (("a", "x"), ("b", "x"), ("a", "y"))
    saved = [samples.saved([samples.step(1)], name=name, folder=tmp_path / folder) for folder, name in places]
    runs = reported_runs([*saved, saved[0], saved[2]])
    names = [str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x"), str(tmp_path / "a" / "y")]
    assert [run.name for run in runs] == [*names, f"{names[0]} (2)", f"{names[2]} (2)"]
    assert [run.role for run in runs] == [run.name for run in runs]
    assert [run.name for run in reported_runs(saved[1:])] == ["x", "y"]


def test_a_judge_gives_the_alerts() -> None:
    saved = samples.saved([samples.step(1), samples.alert()])
    (run,) = reported_runs([saved], judge=lambda one: (samples.alert("skip_rate", len(one.steps)),))
    assert [alert.rule for alert in run.summary.alerts] == ["skip_rate"]
    assert run.summary.recorded_alerts == (samples.alert(),)


def test_one_run_is_written_by_itself_and_several_together() -> None:
    saved = samples.saved([samples.step(1)])
    one = reported_record(reported_runs([saved]))
    two = reported_record(reported_runs([saved, saved]))
    assert isinstance(one, RunSummary)
    assert isinstance(two, RunSummaries)
    assert [run.name for run in two.runs] == [str(saved.folder), f"{saved.folder} (2)"]
