"""What `halfstep lint` finds and how it says so, with rules that are made up."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.linting import SAFE, UNSAFE, prepare, run, use
from tests.lint.toy_rules import BROKEN, TOYS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    prepare(tmp_path, monkeypatch)
    return tmp_path


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

    def test_a_folder_that_cannot_be_looked_into(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scan = os.scandir

        def refuse(path: str) -> object:
            if str(path).endswith("pkg"):
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
        assert run() == 2
        told = "halfstep: Cannot look into pkg: Permission denied.\n"
        assert capsys.readouterr() == (f"{SAFE}1 finding in 1 of 2 files. --fix fixes 1.\n", told)
        assert run("pkg") == 2
        assert capsys.readouterr() == ("No findings in 0 files.\n", told)

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
            (
                ["--stdin-filename", "a.py", "safe.py"],
                "--stdin-filename is what code on standard input is called.",
            ),
            (["--select", ""], "--select names no rule. Name some, or ALL"),
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
        assert run("pkg") == 1
        assert run("--force-exclude", "safe.py", "clean.py") == 0
        assert capsys.readouterr().out.endswith("No findings in 1 file.\n")
        (folder / "build").mkdir()
        (folder / "build" / "a.py").write_text("old_scaler\n")
        (folder / "pkg" / "pyproject.toml").write_text("[tool.halfstep.lint]\n")  # A configuration of its own, for `pkg` alone.
        assert run("--force-exclude", "build/a.py", "pkg/unsafe.py", "pkg") == 0

    def test_a_comment_that_is_wrong_is_told(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "a.py").write_text("old_scaler  # halfstep: ignore[HS901, HS042]\n")
        assert run("a.py") == 0
        assert capsys.readouterr().err.startswith("halfstep: warning: a.py:1: # halfstep: ignore[...] names 'HS042', which is no rule.")


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
    @pytest.mark.parametrize("name", ["HS901", "old_name", " HS901 "])
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
