from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError
from halfstep.files import check_writable, rewrite, write_text

needs_a_user = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX files")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_text_is_written_in_utf8(tmp_path: Path) -> None:
    path = tmp_path / "überblick 报告.html"
    write_text(path, "µ-batch: 半 \U0001f600\n")
    assert path.read_bytes() == "µ-batch: 半 \U0001f600\n".encode()
    assert os.listdir(tmp_path) == [path.name]


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "a long first version")
    write_text(path, "short")
    assert path.read_text(encoding="utf-8") == "short"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_path_without_a_folder_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(Path("here.txt"), "x")
    assert (tmp_path / "here.txt").read_text(encoding="utf-8") == "x"


@needs_posix
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o666), (0o027, 0o640)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    write_text(tmp_path / "file", "x")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert os.umask(mask) == mask


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("odd")])
@pytest.mark.parametrize("moment", ["chmod", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException
) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")

    def fail(*_: object) -> None:
        assert len(os.listdir(tmp_path)) == 2
        raise error

    monkeypatch.setattr(Path, moment, fail)
    expected = ConfigurationError if isinstance(error, OSError) else type(error)
    with pytest.raises(
        expected, match=r"Cannot write .*run\.json: No space left on device\." if isinstance(error, OSError) else None
    ) as caught:
        write_text(path, "new")
    if isinstance(error, OSError):
        assert caught.value.__cause__ is error
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_text_that_is_no_unicode_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        write_text(path, "new \udc80")
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize("write", [check_writable, lambda path: write_text(path, "x")])
class TestRefusals:
    def test_a_missing_folder(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        with pytest.raises(ConfigurationError, match=r"Cannot write .*out\.html: there is no folder .*missing\. Make it first\."):
            write(tmp_path / "missing" / "out.html")
        assert os.listdir(tmp_path) == []

    def test_a_folder_as_the_file(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        with pytest.raises(ConfigurationError, match=r"Cannot write .*: it is a folder\. Name a file in it\."):
            write(tmp_path)

    def test_a_file_as_the_folder(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        (tmp_path / "file").write_text("x", encoding="utf-8")
        with pytest.raises(ConfigurationError, match=r"there is no folder .*file\."):
            write(tmp_path / "file" / "out.html")

    @needs_a_user
    def test_a_folder_that_may_not_be_written_to(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigurationError, match=r"no permission to write in the folder"):
            write(tmp_path / "out.html")
        tmp_path.chmod(0o700)

    def test_a_folder_that_says_no(self, tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode == os.W_OK))
        with pytest.raises(ConfigurationError, match=rf"no permission to write in the folder {tmp_path}\."):
            write(tmp_path / "out.html")


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    for write in (check_writable, lambda path: write_text(path, "x")):
        with pytest.raises(ConfigurationError, match=r"Cannot write .*: File name too long\."):
            write(tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == []


def test_the_longest_name_that_the_file_system_takes_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("x" * 255), "x")
    assert os.listdir(tmp_path) == ["x" * 255]


@needs_posix
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"
    target.unlink()
    write_text(link, "newer")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "newer"


@needs_posix
def test_a_pipe_is_written_to_and_not_replaced() -> None:
    reader, writer = os.pipe()
    write_text(Path(f"/dev/fd/{writer}"), "through the pipe")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(reader)
    os.close(writer)


@needs_posix
def test_a_device_is_not_replaced_by_a_file() -> None:
    write_text(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@needs_posix
def test_a_device_that_may_not_be_written_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != Path("/dev/null"))
    with pytest.raises(ConfigurationError, match=r"Cannot write /dev/null: no permission\."):
        check_writable(Path("/dev/null"))


class TestRewriting:
    @needs_posix
    @pytest.mark.parametrize("mode", [0o755, 0o600, 0o640])
    def test_permissions_stay(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "train.py"
        path.write_bytes(b"old")
        path.chmod(mode)
        rewrite(path, b"new\r\n\xff")
        assert path.read_bytes() == b"new\r\n\xff"
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.listdir(tmp_path) == ["train.py"]

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file to somebody")
    def test_the_owner_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "train.py"
        path.write_bytes(b"old")
        os.chown(path, 12345, 23456)
        rewrite(path, b"new")
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)

    @needs_posix
    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        target, link = tmp_path / "target.py", tmp_path / "link.py"
        target.write_bytes(b"old")
        link.symlink_to(target.name)
        rewrite(link, b"new")
        assert link.is_symlink()
        assert target.read_bytes() == b"new"

    @pytest.mark.parametrize("name", ["none.py", "folder", "missing/train.py"])
    def test_what_is_no_file_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(ConfigurationError, match=r"Cannot write .*: (there is no such file|it is a folder|there is no folder)"):
            rewrite(tmp_path / name, b"new")
        assert os.listdir(tmp_path) == ["folder"]

    def test_a_failure_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "train.py"
        path.write_bytes(b"old")

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", fail)
        with pytest.raises(ConfigurationError, match=r"Cannot write .*train\.py: No space left on device\."):
            rewrite(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["train.py"]

    @needs_a_user
    def test_a_file_that_may_not_be_written_to_is_not_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "train.py"
        path.write_bytes(b"old")
        path.chmod(0o444)
        with pytest.raises(ConfigurationError, match=r"Cannot write .*train\.py: no permission\."):
            rewrite(path, b"new")

    def test_a_file_that_says_no_is_not_replaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "train.py"
        path.write_bytes(b"old")
        monkeypatch.setattr(os, "access", lambda asked, mode: not (Path(asked) == path and mode == os.W_OK))
        with pytest.raises(ConfigurationError, match=r"Cannot write .*train\.py: no permission\."):
            rewrite(path, b"new")
        assert path.read_bytes() == b"old"

    @needs_posix
    def test_a_device_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Cannot write /dev/null: there is no such file\."):
            rewrite(Path("/dev/null"), b"gone")
