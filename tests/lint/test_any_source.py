"""Whatever a file holds, the rules do not crash on it, and what is fixed parses."""

from __future__ import annotations

import ast
import multiprocessing
import random
import sysconfig
import warnings
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.lint.checking import RuleBook, check_source
from halfstep.lint.module import parse_module
from halfstep.lint.rules import RULES
from halfstep.lint.source import read_script
from tests.lint.judging import fixed

BOOK = RuleBook(rules=RULES, codes=frozenset(rule.code for rule in RULES))
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
EXAMPLES = tuple(text for rule in RULES for text in (*rule.good, *(bad.code for bad in rule.bad)))


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return False
    return True


def _trouble(path: Path) -> list[str]:
    """What goes wrong with a file as it is, and with an example of a rule in front of it."""
    try:
        source = read_script(path.read_bytes(), path=str(path))
    except (SyntaxError, ValueError):
        return []  # Files that test the parser.
    checked = check_source(source, BOOK, allowed=frozenset({"safe", "unsafe"}))
    trouble = [*checked.failures]
    chance = random.Random(path.name)
    text = chance.choice(EXAMPLES) + source.text
    # One file in four, since a fix parses it again and again.
    if chance.random() < 0.25 and _parses(text) and source.text.count("\n") < 1000 and not _parses(fixed(text, RULES)):
        trouble.append(f"{path}: the fixed text does not parse")
    return trouble


def test_every_file_of_the_standard_library() -> None:
    paths = sorted(path for path in LIBRARY.rglob("*.py") if "site-packages" not in path.parts)
    assert len(paths) > 500
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        trouble = [line for lines in pool.imap_unordered(_trouble, paths, chunksize=16) for line in lines]
    assert trouble == []


@st.composite
def _mutations(draw: st.DrawFn) -> str:
    """An example of a rule with lines left out, doubled, swapped, indented, or taken from another one."""
    lines = draw(st.sampled_from(EXAMPLES)).splitlines()
    others = draw(st.sampled_from(EXAMPLES)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(lines) - 1))
        change = draw(st.sampled_from(("drop", "double", "swap", "indent", "other", "comment")))
        if change == "drop" and len(lines) > 1:
            del lines[place]
        elif change == "double":
            lines.insert(place, lines[place])
        elif change == "swap":
            lines[place], lines[place - 1] = lines[place - 1], lines[place]
        elif change == "indent":
            lines[place] = "    " + lines[place]
        elif change == "other":
            lines.insert(place, draw(st.sampled_from(others)))
        else:
            lines[place] += "  # été"
    return "\n".join(lines) + draw(st.sampled_from(("\n", "")))


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=_mutations())
def test_mutated_examples(text: str) -> None:
    if not _parses(text):
        return
    module = parse_module(text)
    for rule in RULES:
        for finding in rule.check(module):
            assert 1 <= getattr(finding.node, "lineno", 0) <= text.count("\n") + 1
            assert finding.message.endswith(".")
    once = fixed(text, RULES)
    assert _parses(once), once
    assert fixed(once, RULES) == once
