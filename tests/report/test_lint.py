"""What was found, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from halfstep.records import RuleRecord, Violation
from halfstep.report.lint import (
    difference,
    finding_line,
    findings_json,
    github_lines,
    rule_lines,
    statistics_json,
    statistics_lines,
    styled_line,
    summary_text,
)
from halfstep.report.lint_sarif import findings_sarif
from tests.strategies import violations

SAFE = Violation(code="HS002", rule="clip_before_unscale", path="a/train.py", line=50, column=9, message="Clipped.", fix="safe")
UNSAFE = replace(SAFE, fix="unsafe", line=60)
PLAIN = replace(SAFE, code="HS012", rule="fp16_without_scaler", path="b.py", fix=None)
CELL = replace(PLAIN, path="c.ipynb", cell=3)
RULES = (
    RuleRecord(code="HS002", name="clip_before_unscale", severity="error", summary="Clipped.", page="# HS002"),
    RuleRecord(code="HS012", name="fp16_without_scaler", severity="warning", summary="No scaler.", page="# HS012"),
    RuleRecord(code="HS018", name="sync_every_step", severity="info", summary="Waiting.", page="# HS018"),
)


class TestText:
    @pytest.mark.parametrize(
        ("violation", "line"),
        [
            (SAFE, "a/train.py:50:9: HS002 clip_before_unscale Clipped. [fixable]"),
            (UNSAFE, "a/train.py:60:9: HS002 clip_before_unscale Clipped. [fixable with --unsafe-fixes]"),
            (PLAIN, "b.py:50:9: HS012 fp16_without_scaler Clipped."),
            (CELL, "c.ipynb:cell 3:50:9: HS012 fp16_without_scaler Clipped."),
            (replace(PLAIN, message="a\nb\x1b[31m[red]"), "b.py:50:9: HS012 fp16_without_scaler a b [31m[red]"),
            (replace(PLAIN, path="x\ny\x1b.py"), "x y .py:50:9: HS012 fp16_without_scaler Clipped."),
        ],
    )
    def test_a_finding_is_one_line(self, violation: Violation, line: str) -> None:
        assert finding_line(violation) == line
        assert styled_line(violation).plain == line

    @given(violation=violations())
    def test_colours_change_no_character(self, violation: Violation) -> None:
        assert styled_line(violation).plain == finding_line(violation)

    def test_colours(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
        console.print(styled_line(SAFE), soft_wrap=True)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b[1;31mHS002\x1b[0m" in printed
        assert printed.count("\n") == 1

    @pytest.mark.parametrize(
        ("found", "files", "fixed", "text"),
        [
            ([], 0, 0, "No findings in 0 files."),
            ([], 1, 0, "No findings in 1 file."),
            ([], 1200, 0, "No findings in 1,200 files."),
            ([], 3, 2, "Fixed 2 findings. No findings are left in 3 files."),
            ([PLAIN], 1, 0, "1 finding in 1 of 1 file."),
            ([PLAIN, CELL], 5, 0, "2 findings in 2 of 5 files."),
            ([SAFE, SAFE, PLAIN], 5, 0, "3 findings in 2 of 5 files. --fix fixes 2."),
            ([UNSAFE], 1, 0, "1 finding in 1 of 1 file. --fix --unsafe-fixes fixes 1."),
            ([SAFE, UNSAFE, UNSAFE], 1, 0, "3 findings in 1 of 1 file. --fix fixes 1, --fix --unsafe-fixes 2 more."),
            ([UNSAFE], 1, 1, "Fixed 1 finding. 1 finding is left in 1 of 1 file. --fix --unsafe-fixes fixes 1."),
            ([PLAIN, PLAIN], 1, 3, "Fixed 3 findings. 2 findings are left in 1 of 1 file."),
        ],
    )
    def test_the_summary(self, found: list[Violation], files: int, fixed: int, text: str) -> None:
        assert summary_text(found, files=files, fixed=fixed) == text


class TestJson:
    def test_keys(self) -> None:
        assert json.loads(findings_json([SAFE, CELL])) == [
            {
                "code": "HS002",
                "rule": "clip_before_unscale",
                "path": "a/train.py",
                "line": 50,
                "column": 9,
                "message": "Clipped.",
                "fix": "safe",
            },
            {
                "code": "HS012",
                "rule": "fp16_without_scaler",
                "path": "c.ipynb",
                "line": 50,
                "column": 9,
                "message": "Clipped.",
                "fix": None,
                "cell": 3,
            },
        ]
        assert list(json.loads(findings_json([SAFE]))[0]) == ["code", "rule", "path", "line", "column", "message", "fix"]

    def test_nothing_is_an_empty_list(self) -> None:
        assert json.loads(findings_json([])) == []

    @given(found=st.lists(violations()))
    def test_anything_can_be_written(self, found: list[Violation]) -> None:
        assert len(json.loads(findings_json(found))) == len(found)
        assert findings_json(found).isascii()


class TestGitHub:
    @pytest.mark.parametrize(
        ("violation", "line"),
        [
            (
                SAFE,
                "::error file=a/train.py,line=50,col=9,title=halfstep HS002 clip_before_unscale::"
                "a/train.py:50:9: HS002 clip_before_unscale Clipped.",
            ),
            (
                replace(PLAIN, path="a,b:c%.py", message="50% of\r\nx: y, z"),
                "::warning file=a%2Cb%3Ac%25.py,line=50,col=9,title=halfstep HS012 fp16_without_scaler::"
                "a,b:c%25.py:50:9: HS012 fp16_without_scaler 50%25 of%0D%0Ax: y, z",
            ),
            (
                CELL,
                "::warning file=c.ipynb,line=1,col=1,title=halfstep HS012 fp16_without_scaler::"
                "c.ipynb:cell 3:50:9: HS012 fp16_without_scaler Clipped.",
            ),
            (replace(SAFE, code="HS018", rule="sync_every_step"), "::notice file=a/train.py"),
            (replace(SAFE, code="HS000", rule="syntax_error"), "::error file=a/train.py"),
        ],
    )
    def test_a_finding_is_a_command(self, violation: Violation, line: str) -> None:
        (command,) = github_lines([violation], RULES)
        assert command == line or ("::" not in line[2:] and command.startswith(line))

    @given(violation=violations())
    def test_nothing_ends_a_command_early(self, violation: Violation) -> None:
        (command,) = github_lines([violation], RULES)
        properties = command.split(" ", 1)[1].split("::")[0]
        assert "\n" not in command
        assert "\r" not in command
        assert properties.count(",") == 3


class TestSarif:
    """The structure that the standard asks for: there is no schema on this machine, so its rules are spelled out."""

    def run(self, *found: Violation, failures: tuple[str, ...] = ()) -> dict[str, Any]:
        document = json.loads(findings_sarif(found, RULES, version="1.2.3", failures=failures))
        assert document["version"] == "2.1.0"
        assert document["$schema"].endswith("sarif-2.1.0.json")
        (run,) = document["runs"]
        assert run["columnKind"] == "unicodeCodePoints"
        self.check_driver(run["tool"]["driver"])
        for result in run["results"]:
            self.check_result(result, run["tool"]["driver"]["rules"])
        (invocation,) = run["invocations"]
        assert invocation["executionSuccessful"] is (not failures)
        assert [note["message"]["text"] for note in invocation["toolExecutionNotifications"]] == list(failures)
        return dict(run)

    def check_driver(self, driver: dict[str, Any]) -> None:
        assert (driver["name"], driver["semanticVersion"]) == ("halfstep", "1.2.3")
        assert [rule["id"] for rule in driver["rules"]] == ["HS002", "HS012", "HS018"]
        for rule in driver["rules"]:
            assert set(rule) == {"id", "name", "shortDescription", "help", "defaultConfiguration"}
            assert rule["shortDescription"]["text"]
            assert rule["help"] == {"text": f"# {rule['id']}", "markdown": f"# {rule['id']}"}
        assert [rule["defaultConfiguration"]["level"] for rule in driver["rules"]] == ["error", "warning", "note"]

    def check_result(self, result: dict[str, Any], rules: list[dict[str, Any]]) -> None:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        region = location["physicalLocation"]["region"]
        assert all(isinstance(number, int) and number >= 1 for number in region.values())
        assert set(region) <= {"startLine", "startColumn"}

    def places(self, *found: Violation) -> list[Any]:
        return [result["locations"][0]["physicalLocation"] for result in self.run(*found)["results"]]

    def test_findings(self) -> None:
        run = self.run(SAFE, PLAIN)
        assert [(result["ruleId"], result["level"], result["properties"]) for result in run["results"]] == [
            ("HS002", "error", {"fix": "safe"}),
            ("HS012", "warning", {"fix": None}),
        ]
        assert self.places(SAFE) == [{"artifactLocation": {"uri": "a/train.py"}, "region": {"startLine": 50, "startColumn": 9}}]

    def test_a_cell_is_named_in_the_message(self) -> None:
        (result,) = self.run(CELL)["results"]
        assert result["message"]["text"] == "c.ipynb:cell 3:50:9: Clipped."
        assert self.places(CELL) == [{"artifactLocation": {"uri": "c.ipynb"}, "region": {"startLine": 1}}]

    @pytest.mark.parametrize(
        ("path", "uri"),
        [
            ("a b/ü#.py", "a%20b/%C3%BC%23.py"),
            ("a\udcff.py", "a%FF.py"),
            ("/tmp/a b.py", "file:///tmp/a%20b.py"),
            ("../a.py", "../a.py"),
            ("-", "-"),
        ],
    )
    def test_paths_are_uris(self, path: str, uri: str) -> None:
        assert self.places(replace(SAFE, path=path))[0]["artifactLocation"] == {"uri": uri}

    def test_nothing_and_failures(self) -> None:
        assert self.run()["results"] == []
        assert self.run(failures=("Cannot read a.py.",))["results"] == []


class TestStatistics:
    def test_most_come_first(self) -> None:
        found = [PLAIN, *[SAFE] * 1000, UNSAFE, CELL]
        assert list(statistics_lines(found)) == [
            "1,001  HS002 clip_before_unscale [1,000 fixable, 1 with --unsafe-fixes]",
            "    2  HS012 fp16_without_scaler",
        ]
        assert json.loads(statistics_json(found)) == [
            {"code": "HS002", "rule": "clip_before_unscale", "count": 1001, "safe": 1000, "unsafe": 1},
            {"code": "HS012", "rule": "fp16_without_scaler", "count": 2, "safe": 0, "unsafe": 0},
        ]

    def test_equal_ones_come_by_code(self) -> None:
        assert [line[3:8] for line in statistics_lines([PLAIN, SAFE])] == ["HS002", "HS012"]

    def test_nothing(self) -> None:
        assert list(statistics_lines([])) == []
        assert json.loads(statistics_json([])) == []


def test_rules_are_listed_in_columns() -> None:
    assert list(rule_lines(RULES)) == [
        "HS002  error    clip_before_unscale  Clipped.",
        "HS012  warning  fp16_without_scaler  No scaler.",
        "HS018  info     sync_every_step      Waiting.",
    ]
    assert list(rule_lines([])) == []


class TestDifferences:
    def test_only_what_is_near_a_change_is_shown(self) -> None:
        before = b"".join(b"%d\n" % number for number in range(20))
        assert difference("a.py", before, before.replace(b"10\n", b"x\n")) == (
            b"--- a.py\n+++ a.py\n@@ -8,7 +8,7 @@\n 7\n 8\n 9\n-10\n+x\n 11\n 12\n 13\n"
        )

    def test_nothing(self) -> None:
        assert difference("a.py", b"x\n", b"x\n") == b""

    def test_only_line_feeds_end_lines(self) -> None:
        assert b"-a\x0cb\rc\r\n+a\x0cb\rd\r\n" in difference("a.py", b"a\x0cb\rc\r\n", b"a\x0cb\rd\r\n")

    @pytest.mark.parametrize("name", ["a b.py", "a\tb.py", "a\nb.py", 'a"b.py', "a\\b.py", "ü.py", "\udcff.py", "\x1b[1m.py"])
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"\xef\xbb\xbfx = 1\r\ny\r\n", b"\xef\xbb\xbfx = 2\r\ny\r\n"),
            (b"x\ry\rz", b"x\rz\rz"),
            (b"# coding: latin-1\n# \xe9\nx\n", b"# coding: latin-1\n# \xe9\ny\nz"),
            (b"x\r\ny\nz", b"x\ny\r\nz\n"),
        ],
    )
    def test_they_can_be_applied(self, tmp_path: Path, name: str, before: bytes, after: bytes) -> None:
        (tmp_path / name).write_bytes(before)
        shown = difference(name, before, after)
        done = subprocess.run(["patch", "-p0"], input=shown, check=False, timeout=60, capture_output=True, cwd=tmp_path)
        assert (done.returncode, (tmp_path / name).read_bytes()) == (0, after), done.stdout
        assert os.listdir(os.fsencode(tmp_path)) == [os.fsencode(name)]
