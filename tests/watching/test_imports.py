from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.watching.imports import FirstImport

NAME = "imported_here"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported."""
    file = tmp_path / f"{NAME}.py"
    file.write_text("VALUE = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = [*sys.meta_path]
    yield file
    sys.modules.pop(NAME, None)
    assert sys.meta_path == before, "no trace is left"


def test_it_calls_once_after_the_module_is_there(module: Path) -> None:
    seen: list[int] = []
    FirstImport(NAME, called=lambda: seen.append(sys.modules[NAME].VALUE)).expect()
    assert importlib.util.find_spec(NAME) is not None
    assert not seen, "it was only looked for"
    imported = importlib.import_module(NAME)
    assert seen == [3]
    assert imported.__spec__ is not None
    assert type(imported.__loader__) is type(imported.__spec__.loader) is type(importlib.util.find_spec("zipfile").loader)  # type: ignore[union-attr]
    importlib.reload(imported)
    assert seen == [3]


def test_a_module_that_is_there_already() -> None:
    seen: list[str] = []
    before = [*sys.meta_path]
    FirstImport("zipfile" if "zipfile" in sys.modules else "sys", called=lambda: seen.append("called")).expect()
    assert (seen, sys.meta_path) == (["called"], before)


def test_an_import_that_fails_is_tried_again(module: Path) -> None:
    seen: list[str] = []
    module.rename(module.with_suffix(".txt"))
    FirstImport(NAME, called=lambda: seen.append("called")).expect()
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{NAME}'$"):
        importlib.import_module(NAME)
    module.write_text("1 / 0")
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    module.write_text("VALUE = 33  # a file of another size")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).VALUE == 33
    assert seen == ["called"]


def test_it_can_be_forgotten(module: Path) -> None:
    seen: list[str] = []
    awaited = FirstImport(NAME, called=lambda: seen.append("called"))
    awaited.expect()
    awaited.forget()
    awaited.forget()
    importlib.import_module(NAME)
    assert not seen


def test_a_loader_can_be_asked_as_before(module: Path) -> None:
    awaited = FirstImport(NAME, called=list)
    awaited.expect()
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(NAME) == "VALUE = 3"  # type: ignore[attr-defined]
    awaited.forget()
