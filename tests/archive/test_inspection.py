"""What is found where a checkpoint should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from halfstep.archive import inspect_path, places_of, read_record
from halfstep.errors import CheckpointError, ConfigurationError
from tests.archive import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.sealed(tmp_path / "step-00000100.pt")


def spoil(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x7f")


class TestOne:
    def test_a_file_that_is_valid(self, path: Path) -> None:
        found = inspect_path(path)
        assert (found.path, found.kind, found.fault, found.is_valid) == (str(path), "file", "", True)
        assert found.bytes == path.stat().st_size
        assert found.checkpoint == samples.record()

    def test_a_folder_that_is_valid(self, tmp_path: Path) -> None:
        path = samples.folder(tmp_path / "step-00000100")
        found = inspect_path(path)
        assert (found.kind, found.fault) == ("folder", "")
        assert found.bytes == sum(file.stat().st_size for file in path.iterdir())
        assert found.checkpoint == samples.record(ranks=2)

    def test_of_one_with_damaged_data_is_told_what_it_says_of_itself(self, path: Path) -> None:
        spoil(path, samples.frame(path.read_bytes())[4][0])
        found = inspect_path(path)
        assert found.fault == f"{path} is damaged: the data of model.table and 1 more (data/0) is not what was saved."
        assert found.checkpoint == samples.record()
        assert inspect_path(path, check=read_record).is_valid

    def test_of_one_with_a_damaged_frame_nothing_is_told(self, path: Path) -> None:
        spoil(path, 35)
        found = inspect_path(path)
        assert found.fault == f"{path} is damaged: the header of its record data.pkl is not what was saved."
        assert found.checkpoint is None
        assert found.bytes == path.stat().st_size

    def test_a_file_of_others_has_that_fault(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("It went well.")
        assert inspect_path(tmp_path / "notes.txt").fault.endswith("notes.txt is no checkpoint of halfstep, but text.")

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*none\.pt\.$"):
            inspect_path(tmp_path / "none.pt")

    def test_one_that_may_not_be_read_has_that_fault(self, path: Path) -> None:
        def refuse(_: Path) -> NoReturn:
            raise CheckpointError(f"Cannot read {path}: Permission denied.")

        found = inspect_path(path, check=refuse)
        assert (found.fault, found.checkpoint) == (f"Cannot read {path}: Permission denied.", None)

    def test_a_folder_that_may_not_be_read_takes_up_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = samples.folder(tmp_path / "step-00000100")

        def refuse(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "iterdir", refuse)
        assert inspect_path(path).bytes == 0

    def test_a_link_to_nothing_in_a_folder_takes_up_nothing(self, tmp_path: Path) -> None:
        path = samples.folder(tmp_path / "step-00000100")
        before = inspect_path(path).bytes
        (path / "link").symlink_to("nothing")
        assert inspect_path(path).bytes == before


class TestPlaces:
    def test_a_checkpoint_is_itself(self, tmp_path: Path, path: Path) -> None:
        folder = samples.folder(tmp_path / "any name")
        assert places_of(path) == [path]
        assert places_of(folder) == [folder]

    def test_a_damaged_one_is_itself(self, tmp_path: Path, path: Path) -> None:
        spoil(path, 0)
        assert places_of(path) == [path]
        (tmp_path / "step-00000200").mkdir()
        assert places_of(tmp_path / "step-00000200") == [tmp_path / "step-00000200"]
        os.truncate(path, 0)
        assert places_of(path) == [path]

    def test_a_folder_of_them_is_all_with_the_newest_first(self, tmp_path: Path, path: Path) -> None:
        newer = samples.folder(tmp_path / "step-00000200")
        (tmp_path / "run.jsonl").touch()
        assert places_of(tmp_path) == [newer, path]

    def test_the_folder_that_one_stands_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "step-00000200").mkdir()
        monkeypatch.chdir(tmp_path / "step-00000200")
        assert places_of(Path()) == [Path()]

    def test_a_folder_without_any(self, tmp_path: Path) -> None:
        message = r"^There is no checkpoint in .*\. A checkpoint is a file such as step-00000100\.pt, or a folder with"
        with pytest.raises(ConfigurationError, match=message):
            places_of(tmp_path)

    def test_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*none\.$"):
            places_of(tmp_path / "none")

    def test_a_file_of_others(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("It went well.")
        with pytest.raises(CheckpointError, match=r"^.*notes\.txt is no checkpoint of halfstep, but text\.$"):
            places_of(tmp_path / "notes.txt")

    def test_a_folder_whose_record_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = samples.folder(tmp_path / "step-00000100")

        def refuse(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=r"^Cannot read .*checkpoint\.json: Permission denied\.$"):
            places_of(folder)

    def test_a_pipe_in_the_place_of_its_record(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000100").mkdir()
        os.mkfifo(tmp_path / "step-00000100" / "checkpoint.json")
        assert places_of(tmp_path / "step-00000100") == [tmp_path / "step-00000100"]
        assert "a pipe" in inspect_path(tmp_path / "step-00000100").fault


def test_no_torch_is_loaded(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from halfstep.archive import *\n"
        f"assert inspect_path(Path({str(path)!r})).is_valid\n"
        "print(*sorted({'torch', 'numpy', 'rich', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
