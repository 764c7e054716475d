"""The names of checkpoints, which there are in a folder, and how one comes in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.archive import checkpoint_name, checkpoints_in, clear_parts, part_of, publish, remove, shelves, step_of
from halfstep.errors import CheckpointError, ConfigurationError
from halfstep.records import CheckpointKind

HOUR = 3600.0


class TestNames:
    @pytest.mark.parametrize(
        ("step", "kind", "name"),
        [
            (0, "file", "step-00000000.pt"),
            (100, "folder", "step-00000100"),
            (99_999_999, "file", "step-99999999.pt"),
            (123_456_789_012, "file", "step-123456789012.pt"),
        ],
    )
    def test_a_step_has_eight_digits_or_more(self, step: int, kind: CheckpointKind, name: str) -> None:
        assert checkpoint_name(step, kind=kind) == name

    def test_no_step_is_negative(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^A checkpoint cannot be that of step -1\. Count steps from 0 or 1\.$"):
            checkpoint_name(-1, kind="file")

    @given(step=st.integers(0, 10**12), kind=st.sampled_from(["file", "folder"]))
    def test_the_step_can_be_read_from_the_name(self, step: int, kind: CheckpointKind) -> None:
        assert step_of(checkpoint_name(step, kind=kind)) == step

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "step-1.pt",
            "step-000000001.pt",
            "step-00000100.pth",
            "step-00000100.pt.part",
            ".step-00000100.pt",
            "STEP-00000100.pt",
            "step--0000100.pt",
            "step-00000100.pt\n",
            "step-\u0660\u0660\u0660\u0660\u0660\u0661\u0660\u0660.pt",
            "last.pt",
            f"step-{'9' * 200}x",
        ],
    )
    def test_other_names_have_none(self, name: str) -> None:
        assert step_of(name) is None


class TestListing:
    def test_the_newest_comes_first(self, tmp_path: Path) -> None:
        names = ["step-00000300", "step-00000200.pt", "step-00000100.pt", "step-100000000.pt"]
        for name in names:
            (tmp_path / name).touch()
        for name in ("run.jsonl", "step-5.pt", part_of(tmp_path / names[0]).name):
            (tmp_path / name).touch()
        assert checkpoints_in(tmp_path) == [
            (100_000_000, tmp_path / "step-100000000.pt"),
            (300, tmp_path / "step-00000300"),
            (200, tmp_path / "step-00000200.pt"),
            (100, tmp_path / "step-00000100.pt"),
        ]

    def test_a_file_and_a_folder_of_one_step_are_two(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000100.pt").touch()
        (tmp_path / "step-00000100").mkdir()
        assert [path.name for _, path in checkpoints_in(tmp_path)] == ["step-00000100", "step-00000100.pt"]

    def test_a_folder_that_is_not_there_has_none(self, tmp_path: Path) -> None:
        assert checkpoints_in(tmp_path / "none") == []
        assert checkpoints_in(tmp_path) == []

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint at .*file\.$"):
            checkpoints_in(tmp_path / "file")

    def test_a_folder_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "listdir", refuse)
        with pytest.raises(CheckpointError, match=r"^Cannot read .*: Permission denied\.$"):
            checkpoints_in(tmp_path)


class TestPublishing:
    def test_a_file_gets_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "step-00000100.pt"
        part = part_of(path)
        part.write_text("new")
        publish(part, path)
        assert path.read_text() == "new"
        assert [*tmp_path.iterdir()] == [path]

    def test_a_file_takes_the_place_of_an_older_one(self, tmp_path: Path) -> None:
        path = tmp_path / "step-00000100.pt"
        path.write_text("old")
        part = part_of(path)
        part.write_text("new")
        with path.open() as reader:
            publish(part, path)
            assert (reader.read(), path.read_text()) == ("old", "new")
        assert [*tmp_path.iterdir()] == [path]

    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        path, target = tmp_path / "latest.pt", tmp_path / "elsewhere" / "step-00000100.pt"
        path.symlink_to(target)
        for content in ("first", "second"):
            part = part_of(path)
            assert part.parent == target.parent
            part.write_text(content)
            publish(part, path)
            assert path.is_symlink()
            assert target.read_text() == content

    @pytest.mark.parametrize("older", ["none", "folder", "full folder"])
    def test_a_folder_gets_its_name(self, tmp_path: Path, older: str) -> None:
        path = tmp_path / "step-00000100"
        if older != "none":
            path.mkdir()
        if older == "full folder":
            (path / "old").touch()
        part = part_of(path)
        part.mkdir()
        (part / "new").touch()
        publish(part, path)
        assert [*tmp_path.rglob("*")] == [path, path / "new"]

    @pytest.mark.parametrize("older", ["file", "folder"])
    def test_a_file_and_a_folder_do_not_take_each_others_place(self, tmp_path: Path, older: str) -> None:
        path = tmp_path / "step-00000100"
        part = part_of(path)
        folder = path if older == "folder" else part
        folder.mkdir()
        (folder / "content").touch()
        (part if older == "folder" else path).write_text("content")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match="a folder is not replaced by a file, nor a file by a folder"):
            publish(part, path)
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_name_as_long_as_a_file_system_allows(self, tmp_path: Path) -> None:
        path = tmp_path / f"{'ä' * 126}.pt"
        part = part_of(path)
        part.write_text("new")
        publish(part, path)
        assert [*tmp_path.iterdir()] == [path]

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_the_names_are_flushed_to_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        path = tmp_path / "step-00000100"
        part = part_of(path)
        part.write_text("new") if kind == "file" else part.mkdir()
        flushed = []
        flush = os.fsync

        def note(descriptor: int) -> None:
            flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, path.exists()))
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", note)
        publish(part, path)
        assert flushed == [*([(part.name, False)] if kind == "folder" else []), (tmp_path.name, True)]

    def test_a_system_that_flushes_no_folders_is_no_fault(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: int) -> NoReturn:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "fsync", refuse)
        part = part_of(tmp_path / "step-00000100.pt")
        part.touch()
        publish(part, tmp_path / "step-00000100.pt")
        assert (tmp_path / "step-00000100.pt").exists()

    @pytest.mark.parametrize("kind", ["none", "file", "folder"])
    def test_what_cannot_be_renamed_leaves_the_older_one(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "step-00000100"
        if kind != "none":
            path.write_text("old") if kind == "file" else path.mkdir()
        before = [*tmp_path.iterdir()]
        with pytest.raises(CheckpointError, match=r"^Cannot write .*step-00000100: No such file or directory\. Older checkpoints are unt"):
            publish(part_of(path), path)
        assert [*tmp_path.iterdir()] == before

    def test_an_older_folder_that_cannot_be_removed_is_no_fault(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(shelves, "remove", refuse)
        path = tmp_path / "step-00000100"
        path.mkdir()
        part = part_of(path)
        part.mkdir()
        (part / "new").touch()
        publish(part, path)
        assert (path / "new").exists()
        monkeypatch.undo()
        assert len([*tmp_path.iterdir()]) == 2


class TestRemoving:
    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000100.pt").touch()
        remove(tmp_path / "step-00000100.pt")
        assert not [*tmp_path.iterdir()]

    def test_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000100").mkdir()
        (tmp_path / "step-00000100" / "rank-0.pt").touch()
        remove(tmp_path / "step-00000100")
        assert not [*tmp_path.iterdir()]

    def test_a_folder_loses_its_name_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(shutil, "rmtree", refuse)
        (tmp_path / "step-00000100").mkdir()
        with pytest.raises(PermissionError):
            remove(tmp_path / "step-00000100")
        assert checkpoints_in(tmp_path) == []
        (part,) = tmp_path.iterdir()
        assert part.name.startswith(".step-00000100.")
        with pytest.raises(PermissionError):
            remove(part)
        assert [*tmp_path.iterdir()] == [part]

    def test_a_link_alone(self, tmp_path: Path) -> None:
        (tmp_path / "kept").mkdir()
        (tmp_path / "latest").symlink_to("kept")
        remove(tmp_path / "latest")
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            remove(tmp_path / "none")


def left(path: Path, *, process: int | None = None, host: str | None = None, token: str = "0" * 8) -> Path:
    """What a process left; a file with something in it."""
    own = part_of(path).name
    begin, _, rest = own.removesuffix(".part").rpartition(".")
    parts = rest.split("-")
    parts[0] = parts[0] if host is None else host
    parts[1] = parts[1] if process is None else str(process)
    part = path.with_name(f"{begin}.{parts[0]}-{parts[1]}-{token}-{parts[3]}.part")
    part.write_text("half")
    return part


def aged(path: Path, hours: float) -> Path:
    then = time.time() - hours * HOUR
    os.utime(path, (then, then))
    return path


@pytest.fixture
def gone() -> int:
    """The number of a process that ran."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-00000100.pt"


class TestParts:
    def test_each_call_names_another(self, path: Path) -> None:
        assert len({part_of(path) for _ in range(100)}) == 100

    def test_two_processes_name_others(self, path: Path) -> None:
        program = f"from pathlib import Path; from halfstep.archive import part_of; print(part_of(Path({str(path)!r})))"
        names = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
        assert len(names) == 2

    @pytest.mark.parametrize("name", ["step-00000100.pt", "step-00000100", "mine.checkpoint", ".hidden", "a b\n.pt"])
    def test_what_they_are_called_is_what_is_cleared(self, tmp_path: Path, gone: int, name: str) -> None:
        part = left(tmp_path / name, process=gone)
        assert part.name.startswith(f".{name}.")
        assert part.name.endswith(".part")
        clear_parts(tmp_path)
        assert not part.exists()

    def test_what_a_dead_process_left_is_removed(self, path: Path, gone: int) -> None:
        file, folder = left(path, process=gone), left(path.with_name("folder"), process=gone)
        folder.unlink()
        folder.mkdir()
        (folder / "rank-0.pt").touch()
        clear_parts(path.parent)
        assert [*path.parent.iterdir()] == []
        assert not file.exists()

    @pytest.mark.parametrize("hours", [0, 1, 100])
    def test_what_this_process_writes_stays(self, path: Path, hours: float) -> None:
        part = part_of(path)
        part.touch()
        aged(part, hours)
        clear_parts(path.parent)
        assert part.exists()

    @pytest.mark.parametrize("hours", [0, 100])
    def test_what_a_running_process_writes_stays(self, path: Path, hours: float) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            part = aged(left(path, process=process.pid), hours)
            clear_parts(path.parent)
            assert part.exists()
            process.communicate(b"\n")
        clear_parts(path.parent)
        assert not part.exists()

    def test_what_another_process_of_this_number_left_is_removed(self, path: Path) -> None:
        part = left(path, process=os.getpid())
        clear_parts(path.parent)
        assert not part.exists()

    def test_a_process_that_may_not_be_asked_runs(self, path: Path, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: int) -> NoReturn:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "kill", refuse)
        part = left(path, process=gone)
        clear_parts(path.parent)
        assert part.exists()

    def test_a_number_that_no_process_can_have_is_that_of_none(self, path: Path) -> None:
        part = left(path, process=9_999_999_999)
        clear_parts(path.parent)
        assert not part.exists()

    @pytest.mark.parametrize(("hours", "stays"), [(0, True), (23, True), (25, False)])
    def test_what_another_machine_left_stays_for_a_day(self, path: Path, gone: int, hours: float, stays: bool) -> None:
        part = aged(left(path, process=gone, host="0" * 8), hours)
        clear_parts(path.parent)
        assert part.exists() is stays

    def test_a_folder_is_as_old_as_what_was_written_last_in_it(self, path: Path) -> None:
        part = left(path, host="0" * 8)
        part.unlink()
        part.mkdir()
        (part / "rank-0.pt").touch()
        aged(part, 48)
        clear_parts(path.parent)
        assert part.exists()
        aged(part / "rank-0.pt", 48)
        aged(part, 48)
        clear_parts(path.parent)
        assert not part.exists()

    def test_other_names_stay(self, path: Path, gone: int) -> None:
        names = ["step-00000100.pt", ".step-00000100.pt.part", ".part", "notes.part", left(path, process=gone).name.removeprefix(".")]
        for name in names:
            (path.parent / name).touch()
        clear_parts(path.parent)
        assert sorted(child.name for child in path.parent.iterdir()) == sorted(names)

    def test_what_a_link_leads_to_stays(self, path: Path, gone: int) -> None:
        (path.parent / "kept").mkdir()
        part = left(path, process=gone)
        part.unlink()
        part.symlink_to("kept")
        clear_parts(path.parent)
        assert [child.name for child in path.parent.iterdir()] == ["kept"]

    def test_what_cannot_be_removed_stays(self, path: Path, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        part = left(path, process=gone)
        monkeypatch.setattr(Path, "unlink", refuse)
        clear_parts(path.parent)
        assert part.exists()

    @pytest.mark.parametrize("make", [lambda _: None, Path.touch])
    def test_a_folder_that_is_none_has_none(self, tmp_path: Path, make: Callable[[Path], None]) -> None:
        make(tmp_path / "folder")
        clear_parts(tmp_path / "folder")
