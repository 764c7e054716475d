"""`halfstep lint` in a folder with a finding of each kind, with rules that are made up."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import halfstep.cli.lint
import halfstep.cli.lint_output
from halfstep.cli import main
from halfstep.lint.rules.rule import AbstractRule
from tests.lint.toy_rules import TOYS

SAFE = "safe.py:2:1: HS901 old_name old_scaler is old. Write new_scaler. [fixable]\n"
UNSAFE = "pkg/unsafe.py:1:1: HS902 undecided It is undecided. [fixable with --unsafe-fixes]\n"


def run(*words: object) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["lint", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def use(monkeypatch: pytest.MonkeyPatch, rules: tuple[AbstractRule, ...]) -> None:
    """Puts these rules in place of the real ones."""
    monkeypatch.setattr(halfstep.cli.lint, "RULES", rules)
    monkeypatch.setattr(halfstep.cli.lint_output, "RULES", rules)


def type_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Puts this on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the files, and lets the command run beside them."""
    use(monkeypatch, TOYS)
    monkeypatch.chdir(folder)
    (folder / "clean.py").write_text("new_scaler\n")
    (folder / "safe.py").write_text("x = 1\nold_scaler\n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "unsafe.py").write_text("undecided_scaler\nscaler\n")
