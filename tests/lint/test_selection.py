"""Which rules are on."""

from __future__ import annotations

import pytest

from halfstep.errors import ConfigurationError
from halfstep.lint.selection import SYNTAX_ERROR, RuleName, Selection, check_selectors, known_rules, matches, selected_codes

KNOWN = known_rules(
    [
        RuleName(code="HS001", name="deprecated_namespace", severity="warning"),
        RuleName(code="HS002", name="clip_before_unscale", severity="error"),
        RuleName(code="HS018", name="sync_every_step", severity="info"),
    ]
)


def on(*selections: Selection) -> str:
    return " ".join(sorted(code.removeprefix("HS") for code in selected_codes(KNOWN, selections)))


def test_the_syntax_error_is_one_of_them() -> None:
    assert KNOWN[0] == SYNTAX_ERROR
    assert known_rules([]) == (SYNTAX_ERROR,)


@pytest.mark.parametrize(
    ("word", "codes"),
    [
        ("ALL", "000 001 002 018"),
        ("all", "000 001 002 018"),
        ("HS", "000 001 002 018"),
        ("HS00", "000 001 002"),
        ("hs01", "018"),
        ("HS002", "002"),
        ("hs002", "002"),
        ("clip_before_unscale", "002"),
        ("syntax_error", "000"),
        ("clip_before", ""),
        ("H", ""),
        ("", ""),
        ("HS0020", ""),
        ("CLIP_BEFORE_UNSCALE", ""),
    ],
)
def test_what_a_word_stands_for(word: str, codes: str) -> None:
    assert " ".join(rule.code.removeprefix("HS") for rule in KNOWN if matches(word, rule)) == codes


@pytest.mark.parametrize(
    ("selections", "codes"),
    [
        ([], "000 001 002"),
        ([Selection()], "000 001 002"),
        ([Selection(select=("HS002",))], "000 002"),
        ([Selection(select=())], "000"),
        ([Selection(select=("ALL",))], "000 001 002 018"),
        ([Selection(select=("sync_every_step",))], "000 018"),
        ([Selection(ignore=("HS002",))], "000 001"),
        ([Selection(ignore=("ALL",))], ""),
        ([Selection(ignore=("HS000",))], "001 002"),
        ([Selection(select=("ALL",), ignore=("HS002",))], "000 001 018"),
        ([Selection(select=("HS002",), ignore=("HS00",))], "002"),
        ([Selection(select=("HS00",), ignore=("HS002",))], "000 001"),
        ([Selection(select=("HS00",), ignore=("HS00",))], ""),
        ([Selection(ignore=("HS001",)), Selection(ignore=("HS002",))], "000"),
        ([Selection(ignore=("HS001",)), Selection(select=("HS001",))], "000 001"),
        ([Selection(select=("ALL",), ignore=("HS000",)), Selection(select=("HS002",))], "002"),
        ([Selection(select=("HS002",)), Selection(ignore=("HS001",))], "000 002"),
    ],
)
def test_what_is_on(selections: list[Selection], codes: str) -> None:
    assert on(*selections) == codes


@pytest.mark.parametrize(
    ("word", "hint"), [("HS003", " Did you mean 'HS00[0-2]' or 'HS0"), ("clip_befor_unscale", " Did you mean 'clip_before"), ("", "")]
)
def test_an_unknown_word_is_refused(word: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--ignore: there is no rule '{word}'\.{hint}.*such as HS018.* such as HS01, names"):
        check_selectors(["HS002", word], known=KNOWN, where="--ignore")
