"""One file through all rules."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import pytest

from halfstep.lint import checking
from halfstep.lint.checking import CheckedFile, RuleBook, check_content, may_hold_amp
from halfstep.lint.magics import unmasked
from halfstep.lint.rules import RULES
from halfstep.lint.rules.rule import AbstractRule, Safety
from halfstep.lint.source import Change
from halfstep.records import Violation
from tests.lint.test_notebooks import code, document
from tests.lint.toy_rules import BROKEN, TOYS, Deep, Shared, Wordy

SAFE: frozenset[Safety] = frozenset({"safe"})
ANY: frozenset[Safety] = frozenset({"safe", "unsafe"})


def check(
    content: str | bytes,
    *,
    path: str = "a.py",
    rules: tuple[AbstractRule, ...] = TOYS,
    off: tuple[str, ...] = ("HS903",),
    allowed: frozenset[Safety] = frozenset(),
) -> CheckedFile:
    codes = frozenset({"HS000", *(rule.code for rule in rules)} - set(off))
    encoded = content.encode() if isinstance(content, str) else content
    return check_content(encoded, path=path, book=RuleBook(rules=rules, codes=codes), allowed=allowed)


def found(checked: CheckedFile) -> list[str]:
    return [
        f"{violation.code} {'' if violation.cell is None else f'{violation.cell}/'}{violation.line}:{violation.column}"
        for violation in checked.violations
    ]


class TestFindings:
    def test_a_finding_is_a_violation(self) -> None:
        assert check("x = 1\ny = old_scaler\n").violations == (
            Violation(
                code="HS901", rule="old_name", path="a.py", line=2, column=5, message="old_scaler is old. Write new_scaler.", fix="safe"
            ),
        )

    def test_they_are_in_the_order_of_the_file(self) -> None:
        checked = check("a = undecided_scaler; old_scaler\nold_scaler\nundecided_scaler\nold_scaler\n")
        assert found(checked) == ["HS902 1:5", "HS901 1:23", "HS901 2:1", "HS902 3:1", "HS901 4:1"]
        assert [violation.fix for violation in checked.violations] == [None, "safe", "safe", "unsafe", "safe"]

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("'é'; old_scaler\n", "1:6"),
            ("'\U0001f600' + old_scaler", "1:7"),
            ("x = 1\r\n\r\nold_scaler\r\n", "3:1"),
            ("x = 1\rold_scaler\r", "2:1"),
            ("x = '''\x0c\x85\u2028\n'''; old_scaler\n", "2:6"),
            ("\x0cold_scaler\n", "1:2"),
            ("\ufeffold_scaler\n", "1:1"),
            ("if x:\n\told_scaler\n", "2:2"),
        ],
    )
    def test_columns_are_characters(self, text: str, place: str) -> None:
        assert found(check(text)) == [f"HS901 {place}"]

    def test_nodes_without_a_position_have_that_of_their_statement(self) -> None:
        assert found(check("x = 1\n\nodd_scaler\ndef f(a): pass\n")) == ["HS904 1:1", "HS904 4:1"]

    def test_rules_that_are_off_are_not_asked(self) -> None:
        assert found(check("scaler; old_scaler")) == ["HS901 1:9"]
        assert found(check("scaler; old_scaler", off=("HS901",))) == ["HS903 1:1"]

    def test_what_the_parser_says_about_other_things_is_silent(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found(check("x = '\\d' is 1\nold_scaler\n", allowed=SAFE)) == []


class TestWhatDoesNotParse:
    @pytest.mark.parametrize(
        ("content", "place"),
        [
            (b"scaler = = 1\n", "1:10"),
            (b"scaler\n\nx = (\n", "3:5"),
            (b"scaler = '\0'\n", None),
            (b"scaler\n\xff\n", "2:1"),
            (b"# scaler\n\n'\xff'\n", "3:1"),
            (b"# coding: nonsense\nscaler", "1:1"),
            (b"print 'scaler'", "1:1"),
            (b"scaler\n" + b"(" * 300 + b")" * 300, None),
            (b"scaler" + b" + 1" * 50_000, None),
            (b"-" * 100_000 + b"scaler", None),
        ],
    )
    def test_it_is_one_finding_at_its_line(self, content: bytes, place: str | None) -> None:
        checked = check(content, allowed=ANY)
        (violation,) = checked.violations
        assert (violation.code, violation.rule, violation.fix) == ("HS000", "syntax_error", None)
        assert place is None or found(checked) == [f"HS000 {place}"]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert re.fullmatch(rf"This does not parse in Python {version}, so that nothing in it was checked: .+\.", violation.message)
        assert (checked.failures, checked.rewriting) == ((), None)

    @pytest.mark.parametrize("content", [b"scaler = = 1\n", b"# scaler\n\n'\xff'\n"])
    def test_it_can_be_switched_off(self, content: bytes) -> None:
        assert check(content, off=("HS000",)).violations == ()

    def test_a_comment_at_the_top_switches_it_off(self) -> None:
        assert check("# halfstep: ignore-file[HS000]\nprint 'scaler'").violations == ()
        assert len(check("# halfstep: ignore-file[HS901]\nprint 'scaler'").violations) == 1

    def test_a_file_without_a_word_of_it_is_not_even_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checking, "read_source", lambda *_, **__: pytest.fail("it was read"))
        assert check(b"print 'example' \xff") == CheckedFile(path="a.py")


class TestSuppressions:
    @pytest.mark.parametrize(
        "text",
        [
            "old_scaler  # halfstep: ignore[HS901]\n",
            "old_scaler(\n    1,\n)  # halfstep: ignore[old_name]\n",
            "f(  # halfstep: ignore[HS901]\n    old_scaler\n)\n",
            "with old_scaler:  # halfstep: ignore\n    pass\n",
            "# halfstep: ignore-file\nold_scaler\n",
            "# halfstep: ignore-file[HS904, HS9]\nodd_scaler; old_scaler\n",
        ],
    )
    def test_a_comment_switches_a_finding_off(self, text: str) -> None:
        assert check(text, allowed=ANY) == CheckedFile(path="a.py")

    def test_a_finding_of_the_whole_file_is_in_no_line(self) -> None:
        assert found(check("x  # halfstep: ignore\nodd_scaler\n")) == ["HS904 1:1"]

    def test_a_comment_of_another_line_or_rule_does_not(self) -> None:
        text = "old_scaler  # halfstep: ignore[HS902]\nwith a:  # halfstep: ignore\n    old_scaler\n"
        assert found(check(text)) == ["HS901 1:1", "HS901 3:5"]

    def test_what_is_switched_off_is_not_fixed(self) -> None:
        checked = check("old_scaler  # halfstep: ignore\nold_scaler\n", allowed=SAFE)
        assert checked.rewriting is not None
        assert checked.rewriting.content == b"old_scaler  # halfstep: ignore\nnew_scaler\n"

    def test_a_comment_that_is_wrong_is_told_with_its_place(self) -> None:
        checked = check("x\nscaler  # halfstep: ignore[HS042]\n")
        assert len(checked.warnings) == 1
        assert checked.warnings[0].startswith("a.py:2: # halfstep: ignore[...] names 'HS042', which is no rule.")
        notebook = check(document(code("x"), code("y\nscaler # halfstep: ignore[]")), path="a.ipynb")
        assert notebook.warnings[0].startswith("a.ipynb:cell 2:2: # halfstep: ignore[] switches nothing off.")


class TestFixes:
    def test_nothing_is_fixed_unless_it_is_allowed(self) -> None:
        assert check("old_scaler\n").rewriting is None

    def test_what_is_left_is_told(self) -> None:
        checked = check("old_scaler\nundecided_scaler\nold_scaler\n", allowed=SAFE)
        assert found(checked) == ["HS902 2:1"]
        assert checked.fixed == 2
        assert checked.rewriting is not None
        assert checked.rewriting.content == b"new_scaler\nundecided_scaler\nnew_scaler\n"
        assert checked.rewriting.changes == (
            Change(label="a.py", before=b"old_scaler\nundecided_scaler\nold_scaler\n", after=b"new_scaler\nundecided_scaler\nnew_scaler\n"),
        )

    def test_what_is_wrong_as_long_as_nothing_is_written_is_told(self) -> None:
        checked = check("old_scaler\nundecided_scaler\n", allowed=SAFE)
        unsaved = checked.unsaved("No space.")
        assert found(unsaved) == ["HS901 1:1", "HS902 2:1"]
        assert (unsaved.failures, unsaved.fixed, unsaved.rewriting, unsaved.unfixed) == (("No space.",), 0, None, ())
        assert check("old_scaler\n").unfixed == ()
        both = check("failing_scaler\nold_scaler\n", rules=BROKEN, allowed=SAFE).unsaved("No space.").failures
        assert ("the rule HS906 failing failed" in both[0], both[1:]) == (True, ("No space.",))

    def test_one_edit_may_fix_several_findings(self) -> None:
        checked = check("old_scaler\n", rules=(Shared(), *TOYS), allowed=SAFE)
        assert (found(checked), checked.fixed, len(checked.unfixed)) == ([], 2, 2)

    def test_decisions_are_made_on_request(self) -> None:
        checked = check("old_scaler\nx = undecided_scaler\nundecided_scaler\n", allowed=ANY)
        assert found(checked) == ["HS902 2:5"]
        assert checked.rewriting is not None
        assert checked.rewriting.content == b"new_scaler\nx = undecided_scaler\ndecided_scaler\n"

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"\xef\xbb\xbf# \xc3\xa9\r\nold_scaler\r\n", b"\xef\xbb\xbf# \xc3\xa9\r\nnew_scaler\r\n"),
            (b"# coding: latin-1\n# \xe9\nold_scaler", b"# coding: latin-1\n# \xe9\nnew_scaler"),
            (b"x = 1\r\nold_scaler if x else 1\ny\r\n", b"x = 1\r\nnew_scaler if x else 1\ny\r\n"),
            (b"old_scaler;  x=1   # keep\n\n\n", b"new_scaler;  x=1   # keep\n\n\n"),
        ],
    )
    def test_the_rest_stays_byte_for_byte(self, before: bytes, after: bytes) -> None:
        rewriting = check(before, allowed=SAFE).rewriting
        assert rewriting is not None
        assert rewriting.content == after

    def test_what_cannot_be_written_back_is_a_warning_and_stays_a_finding(self) -> None:
        checked = check(b"# coding: utf-7\nx = 'a+AGE-b'\nold_scaler\n", allowed=SAFE)
        assert (found(checked), checked.rewriting, checked.fixed) == (["HS901 3:1"], None, 0)
        assert checked.warnings[0].startswith("a.py is not fixed: the result cannot be written back")

    def test_a_fix_that_breaks_the_file_is_a_failure_and_changes_nothing(self) -> None:
        checked = check("breaking_scaler\n", rules=BROKEN, allowed=SAFE)
        assert (found(checked), checked.rewriting) == (["HS905 1:1"], None)
        assert all(failure.startswith("a.py could not be fixed and is as it was: ") for failure in checked.failures)


class TestNotebooks:
    def test_findings_have_their_cell(self) -> None:
        content = document(
            {"cell_type": "markdown", "source": "old_scaler"}, code("%time x\nold_scaler"), code("y = = 1"), code("old_scaler")
        )
        checked = check(content, path="a.ipynb")
        assert found(checked) == ["HS901 2/2:1", "HS000 3/1:5", "HS901 4/1:1"]

    def test_columns_and_lines_are_those_of_the_cell(self) -> None:
        checked = check(document(code("x\n"), code(">>> x\n>>> old_scaler")), path="a.ipynb", rules=(Wordy(), *TOYS))
        assert found(checked) == ["HS901 2/2:5", "HS908 2/2:5"]
        assert checked.violations[1].message == "`old_scaler` of line 2."

    @pytest.mark.parametrize(
        "source", ["x\nhalf", "\thalf", ["import torch.cuda.a", "mp\n", "x"], ["", "half"], "\\u0068alf", "x\nh\\u0061lf", "x \\u001b half"]
    )
    def test_words_are_found_however_they_are_written(self, source: Any) -> None:
        content = document(code(source), code("x = = 1")).replace(b"\\\\u", b"\\u")
        assert found(check(content, path="a.ipynb"))[-1] == "HS000 2/1:5"

    def test_one_without_a_word_is_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checking, "read_source", lambda *_, **__: pytest.fail("it was read"))
        assert check(document(code("x\nexample\n'\x1b'")), path="a.ipynb") == CheckedFile(path="a.ipynb")

    def test_they_are_fixed_in_their_cell(self) -> None:
        content = document(code("%time x\nold_scaler"), code("y = = 1"), code(["old_scaler\n", "undecided_scaler"]))
        checked = check(content, path="a.ipynb", allowed=SAFE)
        assert found(checked) == ["HS000 2/1:5", "HS902 3/2:1"]
        assert checked.rewriting is not None
        assert checked.rewriting.content == content.replace(b"old_scaler", b"new_scaler")
        assert [change.label for change in checked.rewriting.changes] == ["a.ipynb:cell 1", "a.ipynb:cell 3"]

    def test_a_fix_that_breaks_a_cell_is_a_failure_and_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "halfstep.lint.notebooks.unmasked", lambda text, hidden: (unmasked(text, hidden) or "").replace("new_scaler", "= 1")
        )
        content = document(code("old_scaler"), code("x = 1"))
        checked = check(content, path="a.ipynb", allowed=SAFE)
        assert (found(checked), checked.rewriting) == (["HS901 1/1:1"], None)
        (failure,) = checked.failures
        assert failure.startswith("a.ipynb could not be fixed and is as it was: SyntaxError: the result does not parse (invalid syntax)")

    def test_a_file_switches_all_cells_off(self) -> None:
        content = document(code("# halfstep: ignore-file[HS000]"), code("scaler = = 1"))
        assert check(content, path="a.ipynb").violations == ()

    @pytest.mark.parametrize(
        "begin",
        ["%load_ext autoreload\n%autoreload 2\n", "%%time\n", '"""What it is about."""\n', "import torch\n"],
    )
    def test_magics_and_a_docstring_may_stand_above_that(self, begin: str) -> None:
        checked = check(document(code(f"{begin}# halfstep: ignore-file[HS000]\nx = 1"), code("scaler = = 1")), path="a.ipynb")
        assert (checked.violations, checked.warnings) == ((), ())

    def test_what_is_no_notebook_is_one_finding(self) -> None:
        assert found(check(b'{"cells": [\nscaler', path="a.ipynb")) == ["HS000 2:1"]
        assert found(check(b"scaler = 1", path="a.ipynb")) == ["HS000 1:1"]


class TestFailures:
    def test_a_rule_that_fails_is_named_and_loses_no_finding(self) -> None:
        checked = check("failing_scaler\nold_scaler\nfailing_scaler\n", rules=BROKEN)
        assert found(checked) == ["HS906 1:1", "HS901 2:1"]
        (failure,) = checked.failures
        assert re.fullmatch(
            r"a\.py: the rule HS906 failing failed: ZeroDivisionError: oh \(toy_rules\.py:\d+, in check\)\. "
            r"This is a bug in halfstep; please report it with the code\.",
            failure,
        )

    def test_code_that_is_nested_too_deeply_for_a_rule_is_a_failure_of_it(self) -> None:
        checked = check("deep_scaler\nold_scaler\n", rules=(Deep(), *TOYS))
        assert found(checked) == ["HS901 2:1"]
        assert checked.failures == (
            "a.py: the rule HS907 deep failed: code in it is nested too deeply. Take it apart, or leave the file out.",
        )

    def test_it_does_not_keep_others_from_being_fixed(self) -> None:
        checked = check("failing_scaler\nold_scaler\n", rules=BROKEN, allowed=SAFE)
        assert checked.rewriting is not None
        assert checked.rewriting.content == b"failing_scaler\nnew_scaler\n"
        assert len(checked.failures) == 1


class TestTheWordsThatAreLookedFor:
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
    def test_every_example_of_a_rule_has_one(self, rule: AbstractRule) -> None:
        assert all(may_hold_amp(bad.code.encode(), codes=frozenset({rule.code})) for bad in rule.bad)

    @pytest.mark.parametrize(
        ("text", "may"),
        [
            ("from torch import amp", True),
            ("use_amp = True", True),
            ("model.half()", True),
            ("dtype='half'", True),
            ("torch.HalfTensor", True),
            ("s.scale(loss)", True),
            ("import torch", False),
            ("for example in examples: champion, timestamp, amplitude, behalf", False),
            ("", False),
        ],
    )
    def test_words(self, text: str, may: bool) -> None:
        assert may_hold_amp(text.encode()) is may
