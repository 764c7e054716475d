"""`halfstep inspect`, on checkpoints that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import halfstep.cli.inspect
from halfstep.archive import inspect_path, seal
from halfstep.cli import main
from halfstep.errors import CheckpointError
from halfstep.records import Inspection, Inspections
from tests.archive import samples


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.sealed(tmp_path / "step-00000100.pt")


@pytest.fixture
def shelf(tmp_path: Path, path: Path) -> Path:
    """Three checkpoints, the newest of which is damaged."""
    samples.folder(tmp_path / "step-00000200", checkpoint=samples.record(step=200, ranks=2))
    newest = samples.sealed(tmp_path / "step-00000300.pt", samples.record(step=300))
    spoiled(newest)
    return tmp_path


def spoiled(path: Path) -> Path:
    """A checkpoint of which the data of a tensor are damaged."""
    content = bytearray(path.read_bytes())
    content[samples.frame(bytes(content))[6][0]] ^= 1
    path.write_bytes(content)
    return path


class TestExitCodes:
    def test_a_valid_one_is_fine(self, path: Path) -> None:
        assert run(path) == 0

    def test_a_damaged_one_is_a_finding(self, path: Path) -> None:
        assert run(spoiled(path)) == 1

    def test_one_of_several_may_be_damaged(self, path: Path, tmp_path: Path) -> None:
        other = samples.sealed(tmp_path / "other.pt")
        assert run(path, other) == 0
        assert run(path, spoiled(other)) == 1

    def test_one_of_a_folder_may_be_damaged(self, shelf: Path) -> None:
        assert run(shelf) == 1
        (shelf / "step-00000300.pt").unlink()
        assert run(shelf) == 0

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("none.pt", "There is no checkpoint at {}."),
            ("empty", "There is no checkpoint in {}. A checkpoint is a file such as step-00000100.pt, or a folder with a checkpoint.json."),
            ("notes.txt", "{} is no checkpoint of halfstep, but text."),
            ("pipe", "{} is no checkpoint of halfstep, but a pipe."),
        ],
    )
    def test_what_is_no_checkpoint_cannot_be_inspected(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("It went well.")
        os.mkfifo(tmp_path / "pipe")
        assert run(path, tmp_path / name) == 2
        assert capsys.readouterr() == ("", f"halfstep: {message.format(tmp_path / name)}\n")

    def test_none_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run() == 2
        assert "CHECKPOINT..." in capsys.readouterr().err


class TestOutput:
    def test_it_is_printed_with_the_conclusion_last(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(path) == 0
        output = capsys.readouterr()
        assert output.err == ""
        assert output.out.splitlines()[0] == f"Checkpoint: {path}"
        assert output.out.splitlines()[-1] == f"{path} is valid: every byte of it is what was saved at step 100."
        assert "fp16; head=fp32" in output.out
        assert "optimizer.state.0.exp_avg" not in output.out

    def test_a_damaged_one_says_what_and_shows_what_it_holds(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run(spoiled(path))
        output = capsys.readouterr().out
        assert output.endswith(f"{path} is damaged: the data of optimizer.state.0.exp_avg (data/2) is not what was saved.\n")
        assert "fp16; head=fp32" in output

    def test_a_folder_is_listed_with_the_newest_first(self, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run(shelf)
        output = capsys.readouterr().out
        assert output.endswith(f"2 of 3 checkpoints are valid; the newest of those is {shelf}/step-00000200 at step 200.\n")
        places = [output.index(f"{shelf}/{name} ") for name in ("step-00000300.pt", "step-00000200", "step-00000100.pt")]
        assert places == sorted(places)

    def test_tensors_are_listed_on_request(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(path, "--tensors") == 0
        assert "optimizer.state.0.exp_avg" in capsys.readouterr().out

    def test_a_quick_look_does_not_see_damaged_data_and_says_so(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(spoiled(path), "--quick") == 0
        output = capsys.readouterr().out
        assert "The tensors were not read, so that damage to them is not seen" in output
        assert output.endswith("is valid as far as it was read: all but its tensors is what was saved at step 100.\n")

    def test_a_quick_look_sees_the_rest(self, path: Path) -> None:
        os.truncate(path, 700)
        assert run(path, "--quick") == 1

    def test_json_stands_alone_on_standard_output(self, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(shelf, "--json", "-") == 1
        output = capsys.readouterr()
        found = Inspections.from_json(output.out)
        assert [(one.kind, one.is_valid) for one in found.inspections] == [("file", False), ("folder", True), ("file", True)]
        assert output.err.startswith("Checkpoints: 3 checkpoints\n")

    def test_json_of_one_has_the_same_form(self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(path, "--json", tmp_path / "found.json") == 0
        assert json.loads((tmp_path / "found.json").read_text())["inspections"][0]["checkpoint"]["step"] == 100
        assert capsys.readouterr().err == f"Measurements: {tmp_path / 'found.json'}\n"

    def test_a_file_that_cannot_be_written_is_refused_first(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(tmp_path / "none.pt", "--json", tmp_path / "no" / "found.json") == 2
        assert "there is no folder" in capsys.readouterr().err


class TestARunThatGoesOn:
    """It removes checkpoints while they are looked at."""

    def inspecting(self, monkeypatch: pytest.MonkeyPatch, *removed: Path) -> None:
        def inspect(path: Path, **settings: Any) -> Inspection:
            if path in removed:
                path.unlink()
            return inspect_path(path, **settings)

        monkeypatch.setattr(halfstep.cli.inspect, "inspect_path", inspect)

    def test_what_is_gone_is_not_listed(self, shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.inspecting(monkeypatch, shelf / "step-00000300.pt")
        assert run(shelf) == 0
        assert "2 of 2 checkpoints are valid" in capsys.readouterr().out

    def test_nothing_may_be_left(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.inspecting(monkeypatch, path)
        assert run(path) == 2
        assert capsys.readouterr().err == f"halfstep: {path} was removed before it was looked at. Try again.\n"

    def test_a_checkpoint_that_cannot_be_read_is_one_of_those_listed(
        self, shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(path: Path) -> object:
            raise CheckpointError(f"Cannot read {path}: Permission denied.")

        monkeypatch.setattr(halfstep.cli.inspect, "verify", refuse)
        assert run(shelf) == 1
        assert f"Cannot read {shelf}/step-00000100.pt: Permission denied." in capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for word in (
        "--quick",
        "--tensors",
        "--json",
        "Examples:",
        "Exit codes: 0 all are valid, 1 one is damaged, 2",
        "Nothing in a checkpoint",
    ):
        assert word in out


def test_a_name_cannot_change_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = samples.tensor("model.\x1b[31m[red]\n", "data/2")
    path = samples.sealed(tmp_path / "a.pt", samples.record(tensors=(tensor,)))
    assert run(path, "--tensors") == 0
    assert run(spoiled(path), "--tensors") == 1
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "[red]" in output.out


def test_a_real_process_inspects_without_torch_and_executes_nothing(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = samples.saved(tmp_path / "hostile.pt", hostile=Hostile())
    seal(path, samples.record())
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was loaded')\n")
    words = [sys.executable, "-m", "halfstep", "inspect", str(path), "--tensors", "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "its structure names posix.mkdir" in Inspections.from_json(done.stdout).inspections[0].fault
    assert not (tmp_path / "executed").exists()


def test_code_in_a_file_whose_checksums_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-00000100.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"cposix\nsystem\n(S'touch x'\ntR.")
        file.writestr("archive/version", b"3")
    seal(path, samples.record(tensors=(), parts=()))
    assert run(path) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "is never loaded, whatever its checksums say: its structure names posix.system" in printed
