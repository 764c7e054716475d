from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest

import halfstep
from halfstep.journal import read_run

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "loop_with_mistakes.py")

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], float]:
    """The rules that are alerted, and the median of the last losses."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--epochs", "3", *words])
    with warnings.catch_warnings(), halfstep.watch(folder, sinks=["jsonl"]) as seen:
        warnings.filterwarnings("ignore", message="Detected call of")
        runpy.run_path(EXAMPLE, run_name="__main__")
    return [alert.rule for alert in seen.alerts], float(sorted(read_run(folder).steps.loss[-9:])[4])


def test_its_mistakes_are_found_and_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, loss = losses(tmp_path / "wrong", monkeypatch)
    mended_rules, mended_loss = losses(tmp_path / "mended", monkeypatch, "--mended")
    assert rules == ["clip_before_unscale", "schedule_moved_on_skip"]
    assert mended_rules == []
    assert mended_loss < 0.5
    assert loss > 2.0
