"""New folders for runs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError
from halfstep.journal import default_folder


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("some/where/train.pyw", "train"),
        ("/abs/my script v1.2.py", "my_script_v1.2"),
        ("package.module", "package.module"),
        ("torchrun", "torchrun"),
        ("半精度.py", "半精度"),
        ("-c", "c"),
        ("<stdin>", "stdin"),
        ("", "run"),
        ("..", "run"),
    ],
)
def test_a_folder_is_called_after_the_script_and_the_time(script: str, name: str) -> None:
    folder = default_folder(script)
    assert folder.is_dir()
    assert not folder.is_absolute()
    assert re.fullmatch(rf"halfstep-runs/{re.escape(name)}-\d{{8}}-\d{{6}}", folder.as_posix())


def test_runs_that_begin_together_have_a_folder_each() -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = [*pool.map(default_folder, ["train.py"] * 40)]
    assert len({*folders}) == 40
    assert all(folder.is_dir() for folder in folders)
    assert any(folder.name.endswith("-2") for folder in folders)


def test_a_file_in_the_way_is_named() -> None:
    Path("halfstep-runs").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"Cannot make halfstep-runs.train-.*: halfstep-runs is a file\. Rename it"):
        default_folder("train.py")


def test_a_folder_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigurationError, match=r"Cannot make .*: Permission denied\. Name another folder for the run\."):
        default_folder("train.py")


def test_a_package_that_is_run_gives_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_folder("/code/research/__main__.py").name.startswith("research-2")
