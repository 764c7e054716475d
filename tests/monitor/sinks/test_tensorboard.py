"""Steps as curves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import ConfigurationError
from halfstep.monitor import TensorBoardSink
from halfstep.records import Action, Alert
from tests.monitor.toy_rules import step


def points(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[tuple[int, str]]]]:
    """The curves and texts that TensorBoard itself reads."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    found: Any = loading.EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()
    curves = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: [(each.step, each.tensor_proto.string_val[0].decode()) for each in found.Tensors(tag)] for tag in tags["tensors"]}
    return curves, texts


def test_numbers_are_curves_and_the_rest_is_text(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    alert = Alert(rule="skip_rate", step=2, message="Many.", advice="Wait.", site=None, severity="warning")
    sink.write([step(1, grad_norm=2.0, memory_bytes=1024), step(2, loss=float("nan"), grad_norm=float("inf"), skipped=True), alert])
    sink.write([step(3, optimizer="d"), Action(rule="skip_rate", step=3, action="warn", message="Shown.")])
    sink.close()
    curves, texts = points(tmp_path)
    lr, seconds = pytest.approx(0.1), pytest.approx(0.01)
    assert curves == {
        "loss": [(1, 0.5)],
        "scale": [(1, 65536.0), (2, 65536.0)],
        "skipped": [(1, 0.0), (2, 1.0)],
        "grad_norm": [(1, 2.0)],
        "lr": [(1, lr), (2, lr)],
        "step_time_s": [(1, seconds), (2, seconds)],
        "memory_bytes": [(1, 1024.0)],
        "d/loss": [(3, 0.5)],
        "d/scale": [(3, 65536.0)],
        "d/skipped": [(3, 0.0)],
        "d/lr": [(3, lr)],
        "d/step_time_s": [(3, seconds)],
    }
    assert texts == {"alerts/skip_rate/text_summary": [(2, str(alert))], "actions/skip_rate/text_summary": [(3, "warn: Shown.")]}


def test_without_tensorboard_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"The sink 'tensorboard' needs TensorBoard.*pip install 'halfstep\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"Cannot write to .*file: .+\. Name another folder"):
        TensorBoardSink(tmp_path / "file")
