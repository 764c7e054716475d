"""From paths to files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import final

import pytest

from halfstep.errors import ConfigurationError
from halfstep.lint.discovery import SKIPPED_FOLDERS, find_files


def make(top: Path, *names: str) -> None:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("")


def found(*paths: Path | str, excluded: tuple[str, ...] = (), exclude_named: bool = False) -> list[str]:
    discovery = find_files([Path(path) for path in paths], is_excluded=lambda path: path.name in excluded, exclude_named=exclude_named)
    assert discovery.unread == ()
    return [str(path) for path in discovery.files]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_and_notebooks_are_found_in_order(folder: Path) -> None:
    make(folder, "b.py", "a.py", "pkg/z.py", "pkg/a.ipynb", "pkg-2/a.py", "notes.txt", "stub.pyi", "x.pyc", "README.md", "py")
    assert found(".") == ["a.py", "b.py", "pkg/a.ipynb", "pkg/z.py", "pkg-2/a.py"]


def test_paths_begin_as_what_was_named(folder: Path) -> None:
    make(folder, "pkg/a.py")
    assert found("pkg") == ["pkg/a.py"]
    assert found("./pkg/") == ["pkg/a.py"]
    assert found(folder / "pkg") == [f"{folder}/pkg/a.py"]
    (folder / "below").mkdir()
    os.chdir(folder / "below")
    assert found("../pkg") == ["../pkg/a.py"]


def test_a_named_file_may_be_called_anything(folder: Path) -> None:
    make(folder, "train", "stub.pyi", ".venv/x.py")
    assert found("train", "stub.pyi", ".venv/x.py") == [".venv/x.py", "stub.pyi", "train"]


@pytest.mark.parametrize("name", sorted(SKIPPED_FOLDERS))
def test_what_is_not_the_users_own_is_passed_over_unless_it_is_named(folder: Path, name: str) -> None:
    make(folder, "a.py", f"{name}/b.py", f"sub/{name}/deep/c.py")
    assert found(".") == ["a.py"]
    assert found(name) == [f"{name}/b.py"]
    assert found(f"sub/{name}/deep") == [f"sub/{name}/deep/c.py"]


def test_a_file_is_not_passed_over_for_its_name(folder: Path) -> None:
    make(folder, "pkg/build.py", ".github/check.py", "environment/a.py")
    assert found(".") == [".github/check.py", "environment/a.py", "pkg/build.py"]


def test_an_environment_is_known_by_its_configuration(folder: Path) -> None:
    make(folder, "env-3.12/pyvenv.cfg", "env-3.12/a.py", "env-3.12/lib/b.py", "c.py")
    assert found(".") == ["c.py"]
    assert found("env-3.12") == ["env-3.12/a.py", "env-3.12/lib/b.py"]


def test_each_file_is_found_once(folder: Path) -> None:
    make(folder, "pkg/a.py", "pkg/b.py")
    assert found("pkg/a.py", "pkg", ".", folder) == ["pkg/a.py", "pkg/b.py"]


@pytest.mark.parametrize("listed", [("a_link.py", "real.py", "z_link.py"), ("z_link.py", "real.py", "a_link.py")])
def test_a_file_is_found_under_its_own_name_rather_than_that_of_a_link(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...]
) -> None:
    make(folder, "pkg/real.py")
    for link in ("a_link.py", "z_link.py"):
        (folder / "pkg" / link).symlink_to("real.py")
    monkeypatch.setattr(os, "walk", lambda top, **_: iter([(str(top), [], list(listed))]))
    assert found("pkg") == ["pkg/real.py"]
    assert found("pkg/z_link.py", "pkg") == ["pkg/real.py"]
    assert found("pkg/z_link.py") == ["pkg/z_link.py"]
    assert found("pkg", excluded=("real.py",)) == []
    assert found("pkg/a_link.py", excluded=("real.py",)) == ["pkg/a_link.py"]
    assert found("pkg/a_link.py", excluded=("real.py",), exclude_named=True) == []


@pytest.mark.parametrize("listed", [("a_link.py", "z_link.py"), ("z_link.py", "a_link.py")])
def test_of_two_links_the_first_by_name_counts(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...]) -> None:
    make(folder, "real", "pkg/notes.txt")
    for link in listed:
        (folder / "pkg" / link).symlink_to("../real")
    monkeypatch.setattr(os, "walk", lambda top, **_: iter([(str(top), [], list(listed))]))
    assert found("pkg") == ["pkg/a_link.py"]


@pytest.mark.parametrize("target", ["build/real.py", ".venv/lib/real.py", "old/real.py"])
def test_a_link_to_what_is_left_out_is_left_out(folder: Path, target: str) -> None:
    make(folder, target, "pkg/a.py")
    (folder / "pkg" / "link.py").symlink_to(folder / target)
    assert found(".", excluded=("old",)) == ["pkg/a.py"]


def test_folders_are_looked_into_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder, "real", "a/link.py", "b/link.py")
    for name in ("a/link.py", "b/link.py"):
        (folder / name).unlink()
        (folder / name).symlink_to("../real")
    scan = os.scandir
    for is_reversed in (False, True):
        monkeypatch.setattr(os, "scandir", lambda path, is_reversed=is_reversed: Listing(scan(path), is_reversed=is_reversed))
        assert found(".") == ["a/link.py"]


@final
class Listing:
    """What a folder holds, in one order or the other."""

    def __init__(self, entries: Iterator[os.DirEntry[str]], *, is_reversed: bool) -> None:
        self._entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=is_reversed))

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)


def test_links_to_folders_are_not_followed_unless_they_are_named(folder: Path) -> None:
    make(folder, "pkg/a.py")
    (folder / "pkg" / "loop").symlink_to(folder)
    (folder / "other").symlink_to("pkg")
    assert found(".") == ["pkg/a.py"]
    assert found("other") == ["other/a.py"]


def test_what_is_no_file_is_not_found(folder: Path) -> None:
    make(folder, "a.py")
    (folder / "folder.py").mkdir()
    (folder / "broken.py").symlink_to("nowhere.py")
    os.mkfifo(folder / "pipe.py")
    assert found(".") == ["a.py"]


def test_what_is_in_a_folder_that_is_named_is_checked_though_the_folder_is_excluded(folder: Path) -> None:
    make(folder, "old/a.py", "old/deep/b.py", "old/old/c.py")
    assert found("old", excluded=("old",)) == ["old/a.py", "old/deep/b.py"]
    assert found("old", excluded=("old",), exclude_named=True) == []
    assert found("old/a.py", "old/deep", excluded=("old",), exclude_named=True) == []


@pytest.mark.parametrize("name", [*sorted(SKIPPED_FOLDERS), "environment"])
def test_what_a_walk_does_not_come_to_is_left_out_on_request(folder: Path, name: str) -> None:
    make(
        folder, f"{name}/a.py", f"sub/{name}/deep/b.py", "sub/c.py", f"file/{name}", "environment/pyvenv.cfg", "sub/environment/pyvenv.cfg"
    )
    named = [f"{name}/a.py", f"sub/{name}/deep/b.py", f"sub/{name}", "sub/c.py", f"file/{name}"]
    assert found(*named, exclude_named=True) == [f"file/{name}", "sub/c.py"]
    assert found(*(folder / each for each in named), exclude_named=True) == [f"{folder}/file/{name}", f"{folder}/sub/c.py"]
    os.chdir(folder / name)
    assert found("a.py", exclude_named=True) == ["a.py"]


def test_exclusion_is_for_what_is_found_and_on_request_for_what_is_named(folder: Path) -> None:
    make(folder, "a.py", "b.py", "old/c.py")
    assert found(".", excluded=("b.py", "old")) == ["a.py"]
    assert found("b.py", "a.py", excluded=("b.py",)) == ["a.py", "b.py"]
    assert found("b.py", "a.py", excluded=("b.py",), exclude_named=True) == ["a.py"]


@pytest.mark.parametrize("name", ["none.py", "no/folder", "broken.py"])
def test_what_does_not_exist_is_named(folder: Path, name: str) -> None:
    make(folder, "a.py")
    (folder / "broken.py").symlink_to("nowhere.py")
    with pytest.raises(ConfigurationError, match=rf"^There is no file or folder {name}\. Name what is to be checked\.$"):
        find_files([Path("a.py"), Path(name)], is_excluded=lambda _: False)


def test_nothing_may_be_found(folder: Path) -> None:
    make(folder, "notes.txt")
    assert found(".") == []
    assert found() == []


def test_a_folder_that_cannot_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder, "a.py", "data/b.py")
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("data"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    discovery = find_files([Path()], is_excluded=lambda _: False)
    assert [str(path) for path in discovery.files] == ["a.py"]
    assert discovery.unread == ("data: Permission denied",)


def test_a_file_that_cannot_be_looked_at_is_left_to_who_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder, "a.py")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert found(".") == ["a.py"]
