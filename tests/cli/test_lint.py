"""`halfstep lint`, with rules that are made up."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep.cli.lint
import halfstep.cli.lint_output
from halfstep.cli import main
from halfstep.lint.rules.rule import AbstractRule
from tests.lint.test_notebooks import code, document
from tests.lint.toy_rules import BROKEN, TOYS


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["lint", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def use(monkeypatch: pytest.MonkeyPatch, rules: tuple[AbstractRule, ...]) -> None:
    monkeypatch.setattr(halfstep.cli.lint, "RULES", rules)
    monkeypatch.setattr(halfstep.cli.lint_output, "RULES", rules)


def type_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finding of each kind, in which the command runs."""
    use(monkeypatch, TOYS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.py").write_text("new_scaler\n")
    (tmp_path / "safe.py").write_text("x = 1\nold_scaler\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "unsafe.py").write_text("undecided_scaler\nscaler\n")
    return tmp_path


SAFE = "safe.py:2:1: HS901 old_name old_scaler is old. Write new_scaler. [fixable]\n"
UNSAFE = "pkg/unsafe.py:1:1: HS902 undecided It is undecided. [fixable with --unsafe-fixes]\n"


class TestExitCodes:
    def test_nothing_is_wrong(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("clean.py") == 0
        assert capsys.readouterr() == ("No findings in 1 file.\n", "")

    def test_something_is_wrong(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("safe.py", "clean.py") == 1
        assert capsys.readouterr() == (f"{SAFE}1 finding in 1 of 2 files. --fix fixes 1.\n", "")

    def test_the_current_folder_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run() == 1
        summary = "2 findings in 2 of 3 files. --fix fixes 1, --fix --unsafe-fixes 1 more.\n"
        assert capsys.readouterr() == (f"{UNSAFE}{SAFE}{summary}", "")

    def test_a_path_that_does_not_exist(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("safe.py", "none.py") == 2
        assert capsys.readouterr() == ("", "halfstep: There is no file or folder none.py. Name what is to be checked.\n")

    def test_nothing_to_check_is_told_and_no_fault(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "empty").mkdir()
        assert run("empty") == 0
        assert capsys.readouterr() == ("No findings in 0 files.\n", "halfstep: warning: there is no Python file to check in empty\n")

    def test_a_rule_that_fails_is_told_beside_what_was_found(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        use(monkeypatch, BROKEN)
        (folder / "odd.py").write_text("failing_scaler\n")
        assert run("odd.py", "safe.py") == 2
        out, err = capsys.readouterr()
        assert out == f"odd.py:1:1: HS906 failing It fails.\n{SAFE}2 findings in 2 of 2 files. --fix fixes 1.\n"
        assert err.startswith("halfstep: odd.py: the rule HS906 failing failed: ZeroDivisionError: oh (toy_rules.py:")
        assert err.count("\n") == 1

    def test_a_file_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("halfstep.lint.batches.read_content", refuse)
        assert run("safe.py") == 2
        assert capsys.readouterr().err == "halfstep: Cannot read safe.py: Permission denied.\n"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--select", "HS042"], "halfstep: --select: there is no rule 'HS042'. Did you mean 'HS90"),
            (["--ignore", "HS901,nonsense"], "halfstep: --ignore: there is no rule 'nonsense'."),
            (["--explain", "HS042"], "halfstep: There is no rule 'HS042'."),
            (["--format", "xml"], "'xml' is not one of 'text', 'json', 'github', 'sarif'"),
            (["--diff", "--format", "json"], "--diff shows changes, which have no other form."),
            (["--diff", "--statistics"], "--diff shows changes, which have no other form."),
            (["--statistics", "--format", "sarif"], "--statistics are printed as text or json, not as sarif."),
            (["-", "safe.py"], "- is standard input, and is checked alone."),
            (["--fxi"], "Did you mean"),
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
        assert run(*words) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert not out

    def test_a_wrong_configuration(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "pyproject.toml").write_text("[tool.halfstep.lint]\nselekt = []\n")
        assert run() == 2
        assert "pyproject.toml: [tool.halfstep.lint] has no setting 'selekt'. Did you mean 'select'?" in capsys.readouterr().err


class TestSelection:
    @pytest.mark.parametrize(
        ("words", "codes"),
        [
            ([], "HS901 HS902"),
            (["--select", "HS902"], "HS902"),
            (["--select", "HS901, talkative"], "HS901 HS903"),
            (["--select", "ALL"], "HS901 HS902 HS903"),
            (["--select", "ALL", "--ignore", "HS901", "--ignore", "HS902"], "HS903"),
            (["--ignore", "HS9"], ""),
        ],
    )
    def test_the_command_line(self, capsys: pytest.CaptureFixture[str], words: list[str], codes: str) -> None:
        assert run("--format", "json", *words) == bool(codes)
        assert sorted({found["code"] for found in json.loads(capsys.readouterr().out)}) == codes.split()

    def test_the_configuration_and_what_is_stronger(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "pyproject.toml").write_text(
            "[tool.halfstep.lint]\nselect = ['HS903', 'HS901']\n[tool.halfstep.lint.per-file-ignores]\n'safe.py' = ['HS901']\n"
        )
        assert run() == 1
        assert capsys.readouterr().out.startswith("pkg/unsafe.py:2:1: HS903 talkative A scaler.\n1 finding ")
        assert run("--select", "HS901") == 0

    def test_what_is_excluded(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "pyproject.toml").write_text("[tool.halfstep.lint]\nexclude = ['pkg', 'safe.py']\n")
        assert run() == 0
        assert run("safe.py") == 1
        assert run("--force-exclude", "safe.py", "clean.py") == 0
        assert capsys.readouterr().out.endswith("No findings in 1 file.\n")

    def test_a_comment_that_is_wrong_is_told(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "a.py").write_text("old_scaler  # halfstep: ignore[HS901, HS042]\n")
        assert run("a.py") == 0
        assert capsys.readouterr().err.startswith("halfstep: warning: a.py:1: # halfstep: ignore[...] names 'HS042', which is no rule.")


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

    def test_unsafe_fixes_alone_change_nothing(self, folder: Path) -> None:
        assert run("--unsafe-fixes") == 1
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
        assert capsys.readouterr().err == "halfstep: Cannot write safe.py: No space left on device.\n"
        assert (folder / "safe.py").read_text() == "x = 1\nold_scaler\n"
        assert sorted(path.name for path in folder.iterdir()) == ["clean.py", "pkg", "safe.py"]

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
        assert capsys.readouterr().out.startswith("--- a.ipynb:cell 2\n+++ a.ipynb:cell 2\n@@ -1 +1 @@\n-old_scaler\n")


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


class TestFormats:
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--format", "json", "safe.py") == 1
        out, err = capsys.readouterr()
        assert err == ""
        assert json.loads(out) == [
            {
                "code": "HS901",
                "rule": "old_name",
                "path": "safe.py",
                "line": 2,
                "column": 1,
                "message": "old_scaler is old. Write new_scaler.",
                "fix": "safe",
            }
        ]

    def test_json_of_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--format", "json", "clean.py") == 0
        assert json.loads(capsys.readouterr().out) == []

    def test_json_after_fixing_is_what_is_left(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--fix", "--format", "json") == 1
        assert [found["code"] for found in json.loads(capsys.readouterr().out)] == ["HS902"]

    def test_github(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--format", "github") == 1
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith("::error file=pkg/unsafe.py,line=1,col=1,title=halfstep HS902 undecided::")
        assert out[1].startswith("::warning file=safe.py,line=2,col=1,title=halfstep HS901 old_name::")
        assert len(out) == 2

    def test_sarif(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--format", "sarif") == 1
        (found,) = json.loads(capsys.readouterr().out)["runs"]
        assert [result["ruleId"] for result in found["results"]] == ["HS902", "HS901"]
        assert found["tool"]["driver"]["rules"][1]["help"]["markdown"].startswith("# HS901 old_name\n")

    def test_statistics(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--statistics") == 1
        assert capsys.readouterr().out.startswith("1  HS901 old_name [1 fixable]\n1  HS902 undecided [1 with --unsafe-fixes]\n2 findings ")
        assert run("--statistics", "--format", "json", "safe.py") == 1
        assert json.loads(capsys.readouterr().out)[0]["count"] == 1

    def test_what_the_encoding_lacks_is_escaped(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "é.py").write_text("old_scaler\n")
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        assert run("é.py") == 1
        stream.flush()
        stream.seek(0)
        assert stream.read().startswith("\\xe9.py:1:1: HS901")


class TestExplanations:
    @pytest.mark.parametrize("name", ["HS901", "old_name"])
    def test_a_rule_is_explained(self, capsys: pytest.CaptureFixture[str], name: str) -> None:
        assert run("--explain", name) == 0
        assert capsys.readouterr().out.startswith("# HS901 old_name\n\nThe scaler has an old name.\n")

    def test_rules_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--list-rules") == 0
        out = capsys.readouterr().out.splitlines()
        assert out[1] == "HS901  warning  old_name      The scaler has an old name."
        assert len(out) == 1 + len(TOYS)

    def test_help_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--help") == 0
        out = capsys.readouterr().out
        for word in (
            "--fix",
            "--diff",
            "--select",
            "--format",
            "Examples:",
            "Exit codes: 0",
            "[tool.halfstep.lint]",
            "halfstep: ignore[HS002]",
        ):
            assert word in out
