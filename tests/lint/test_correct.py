"""Scripts that are right, as people write them: nothing is said about them, and nothing is changed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.lint.judging import findings, fixed

SCRIPTS = sorted(Path(__file__).with_name("correct").glob("*.py"))


def test_the_scripts_are_there() -> None:
    assert len(SCRIPTS) >= 60


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_nothing_is_found(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a script says what it shows"
    assert findings(text) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_nothing_is_changed(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert fixed(text) == text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_nothing_is_found_in_a_function_around_it(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    assert findings("def everything():\n" + "".join(f"    {line}" if line.strip() else line for line in lines)) == []
