"""What `halfstep lint` fixes, in files and on standard input, with rules that are made up."""

from __future__ import annotations

import io
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final

import pytest

import halfstep.cli.lint
from halfstep.lint.batches import Job, check_files
from halfstep.lint.checking import CheckedFile
from halfstep.lint.rules.rule import AbstractRule
from tests.cli.linting import SAFE, UNSAFE, prepare, run, type_in
from tests.lint.test_notebooks import code, document


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    prepare(tmp_path, monkeypatch)
    return tmp_path


class TestFixing:
    def test_what_is_safe_is_fixed(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "safe.py").chmod(0o750)
        assert run("--fix") == 1
        assert (folder / "safe.py").read_text() == "x = 1\nnew_scaler\n"
        assert stat.S_IMODE((folder / "safe.py").stat().st_mode) == 0o750
        assert (folder / "pkg" / "unsafe.py").read_text() == "undecided_scaler\nscaler\n"
        assert capsys.readouterr().out == (f"{UNSAFE}Fixed 1 finding. 1 finding is left in 1 of 3 files. --fix --unsafe-fixes fixes 1.\n")

    def test_what_decides_is_fixed_on_request(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--fix", "--unsafe-fixes") == 0
        assert (folder / "pkg" / "unsafe.py").read_text() == "decided_scaler\nscaler\n"
        assert capsys.readouterr().out == "Fixed 2 findings. No findings are left in 3 files.\n"

    def test_a_configuration_may_ask_for_it(self, folder: Path) -> None:
        (folder / "pyproject.toml").write_text("[tool.halfstep.lint]\nunsafe-fixes = true\n")
        assert run("--fix", "--no-unsafe-fixes", "pkg") == 1
        assert run("--fix", "pkg") == 0

    def test_unsafe_fixes_alone_change_nothing_and_say_so(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--unsafe-fixes") == 1
        assert capsys.readouterr().err == "halfstep: warning: --unsafe-fixes alone changes nothing. Add --fix or --diff.\n"
        assert (folder / "pkg" / "unsafe.py").read_text() == "undecided_scaler\nscaler\n"

    def test_a_link_stays_a_link(self, folder: Path) -> None:
        (folder / "link.py").symlink_to("safe.py")
        assert run("--fix", "link.py") == 0
        assert (folder / "link.py").is_symlink()
        assert (folder / "safe.py").read_text() == "x = 1\nnew_scaler\n"

    def test_notebooks_are_fixed(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = document(code("%time\nold_scaler"), code("old_scaler = = 1"))
        (folder / "a.ipynb").write_bytes(content)
        assert run("--fix", "a.ipynb") == 1
        assert (folder / "a.ipynb").read_bytes() == content.replace(b"old_scaler", b"new_scaler", 1)
        assert capsys.readouterr().out.startswith("a.ipynb:cell 2:1:14: HS000 syntax_error This does not parse")

    def test_a_file_that_cannot_be_written_is_a_failure(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", fail)
        assert run("--fix", "safe.py") == 2
        assert capsys.readouterr() == (
            f"{SAFE}1 finding in 1 of 1 file. --fix fixes 1.\n",
            "halfstep: Cannot write safe.py: No space left on device.\n",
        )
        assert (folder / "safe.py").read_text() == "x = 1\nold_scaler\n"
        assert sorted(path.name for path in folder.iterdir()) == ["clean.py", "pkg", "safe.py"]

    def test_a_file_that_was_changed_meanwhile_is_left_alone(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def change(jobs: Sequence[Job], rules: tuple[AbstractRule, ...]) -> list[CheckedFile]:
            checked = list(check_files(jobs, rules))
            (folder / "safe.py").write_text("old_scaler  # edited\n")
            return checked

        monkeypatch.setattr(halfstep.cli.lint, "check_files", change)
        assert run("--fix", "safe.py") == 2
        assert capsys.readouterr() == (
            f"{SAFE}1 finding in 1 of 1 file. --fix fixes 1.\n",
            "halfstep: safe.py was changed while it was checked, and is not fixed. Check it again.\n",
        )
        assert (folder / "safe.py").read_text() == "old_scaler  # edited\n"

    def test_a_file_that_was_deleted_meanwhile_is_a_failure(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def delete(jobs: Sequence[Job], rules: tuple[AbstractRule, ...]) -> list[CheckedFile]:
            checked = list(check_files(jobs, rules))
            (folder / "safe.py").unlink()
            return checked

        monkeypatch.setattr(halfstep.cli.lint, "check_files", delete)
        assert run("--fix", "safe.py") == 2
        assert capsys.readouterr().err == "halfstep: Cannot read safe.py: No such file or directory.\n"
        assert not (folder / "safe.py").exists()

    def test_what_is_clean_is_not_touched(self, folder: Path) -> None:
        before = (folder / "clean.py").stat()
        assert run("--fix", "clean.py") == 0
        assert (folder / "clean.py").stat() == before


class TestDifferences:
    def test_a_difference_is_shown_and_nothing_written(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--diff") == 1
        assert capsys.readouterr() == (
            "--- safe.py\n+++ safe.py\n@@ -1,2 +1,2 @@\n x = 1\n-old_scaler\n+new_scaler\n",
            "halfstep: 1 finding would be fixed, 1 would be left; halfstep lint shows them.\n",
        )
        assert (folder / "safe.py").read_text() == "x = 1\nold_scaler\n"

    def test_it_can_be_applied(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--diff", "--fix", "--unsafe-fixes") == 1
        out, err = capsys.readouterr()
        assert err == "halfstep: 2 findings would be fixed, none would be left.\n"
        subprocess.run(["patch", "-p0"], input=out, text=True, check=True, timeout=60, capture_output=True, cwd=folder)
        assert (folder / "safe.py").read_text() == "x = 1\nnew_scaler\n"
        assert (folder / "pkg" / "unsafe.py").read_text() == "decided_scaler\nscaler\n"

    def test_nothing_to_change(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--diff", "clean.py") == 0
        assert capsys.readouterr() == ("", "halfstep: 0 findings would be fixed, none would be left.\n")
        assert run("--diff", "pkg") == 1

    def test_a_cell_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "a.ipynb").write_bytes(document(code("1"), code("old_scaler")))
        assert run("--diff", "a.ipynb") == 1
        assert capsys.readouterr().out.startswith("--- a.ipynb:cell 2\t\n+++ a.ipynb:cell 2\t\n@@ -1 +1 @@\n-old_scaler\n")

    def test_it_is_byte_for_byte(self, folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        before = b"\xef\xbb\xbfold_scaler\r\n"
        (folder / "a b.py").write_bytes(before)
        (folder / "latin.py").write_bytes(b"# coding: latin-1\nold_scaler  # \xe9\n")
        assert run("--diff", "a b.py", "latin.py") == 1
        out = capfdbinary.readouterr().out
        subprocess.run(["patch", "-p0"], input=out, check=True, timeout=60, capture_output=True, cwd=folder)
        assert (folder / "a b.py").read_bytes() == before.replace(b"old", b"new")
        assert (folder / "latin.py").read_bytes() == b"# coding: latin-1\nnew_scaler  # \xe9\n"

    def test_nothing_in_it_changes_a_terminal(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "a.py").write_text("old_scaler  # \x1b[31m\té\r\n")
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run("--diff", "a.py") == 1
        assert terminal.getvalue().endswith("-old_scaler  #  [31m\té \n+new_scaler  #  [31m\té \n")


@final
class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class TestStandardInput:
    def test_it_is_checked(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        type_in(monkeypatch, b"old_scaler\n")
        assert run("-") == 1
        assert capsys.readouterr().out.startswith("-:1:1: HS901 old_name ")

    @pytest.mark.parametrize("words", [["--stdin-filename", "a/b.py", "-"], ["--stdin-filename", "a/b.py"]])
    def test_it_may_have_a_name(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        type_in(monkeypatch, b"old_scaler\n")
        assert run(*words) == 1
        assert capsys.readouterr().out.startswith("a/b.py:1:1: HS901 old_name ")

    @pytest.mark.parametrize(
        ("content", "fixed", "status", "told"),
        [
            (b"\xef\xbb\xbfold_scaler\r\n", b"\xef\xbb\xbfnew_scaler\r\n", 0, "Fixed 1 finding. No findings are left in 1 file.\n"),
            (b"nothing \xff", b"nothing \xff", 0, "No findings in 1 file.\n"),
            (b"undecided_scaler", b"undecided_scaler", 1, "-:1:1: HS902 undecided"),
            (b"scaler = = 1", b"scaler = = 1", 1, "-:1:10: HS000 syntax_error"),
        ],
    )
    def test_the_fixed_code_stands_alone_on_standard_output(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capfdbinary: pytest.CaptureFixture[bytes],
        content: bytes,
        fixed: bytes,
        status: int,
        told: str,
    ) -> None:
        type_in(monkeypatch, content)
        assert run("--fix", "-") == status
        out, err = capfdbinary.readouterr()
        assert out == fixed
        assert err.decode().startswith(told)

    def test_a_name_has_a_configuration(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        (folder / "pyproject.toml").write_text("[tool.halfstep.lint]\nexclude = ['old']\nper-file-ignores = {'a.py' = ['HS901']}\n")
        for name, options, status in (("a.py", [], 0), ("b.py", [], 1), ("old/b.py", [], 1), ("old/b.py", ["--force-exclude"], 0)):
            type_in(monkeypatch, b"old_scaler\n")
            assert run("--stdin-filename", name, *options) == status
        capfdbinary.readouterr()
        type_in(monkeypatch, b"old_scaler\n")
        assert run("--stdin-filename", "old/b.py", "--force-exclude", "--fix") == 0
        assert capfdbinary.readouterr().out == b"old_scaler\n"

    def test_a_notebook(self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        content = document(code("%time\nold_scaler"))
        type_in(monkeypatch, content)
        assert run("--fix", "--stdin-filename", "a.ipynb", "-") == 0
        assert capfdbinary.readouterr().out == content.replace(b"old_scaler", b"new_scaler")

    def test_a_difference(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        type_in(monkeypatch, b"old_scaler\n")
        assert run("--diff", "--fix", "-") == 1
        assert capsys.readouterr().out == "--- -\n+++ -\n@@ -1 +1 @@\n-old_scaler\n+new_scaler\n"

    def test_a_name_in_a_folder_that_is_left_out(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        type_in(monkeypatch, b"old_scaler\n")
        assert run("--stdin-filename", "build/a.py", "--force-exclude") == 0


class TestClosedStreams:
    """A process that was started without a stream has `None` in its place."""

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert run("-") == 2
        assert capsys.readouterr() == ("", "halfstep: Cannot read code: standard input is closed.\n")

    @pytest.mark.parametrize("words", [["safe.py"], ["--format", "json", "safe.py"], ["--format", "github", "safe.py"], ["--statistics"]])
    def test_standard_output(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        assert run(*words) == 1
        assert capsys.readouterr().err == ""
        assert run("--list-rules") == 0

    def test_standard_error(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys, "stderr", None)
        assert run("safe.py", "none.py") == 2
        assert run("--diff", "safe.py") == 1
        assert capsys.readouterr().out.startswith("--- safe.py\n")

    @pytest.mark.parametrize("words", [["--fix", "-"], ["--diff", "-"]])
    def test_code_is_not_lost_in_silence(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
    ) -> None:
        type_in(monkeypatch, b"old_scaler\n")
        monkeypatch.setattr(sys, "stdout", None)
        assert run(*words) == 2
        assert capsys.readouterr().err == "halfstep: Cannot write code: standard output is closed.\n"
