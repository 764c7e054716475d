"""A page of documentation for each rule, made from the rule itself: `python -m halfstep.lint.pages docs/rules`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from halfstep.errors import ConfigurationError, did_you_mean
from halfstep.files import write_text
from halfstep.lint.module import parse_module
from halfstep.lint.rules import RULES
from halfstep.lint.rules.rule import AbstractRule, Bad, Safety
from halfstep.lint.selection import SYNTAX_ERROR, known_rules
from halfstep.records import RuleRecord

__all__ = ["explained", "index_page", "main", "pages", "rule_page", "rule_records"]

_INDEX: Final = "README.md"
_SUPPRESSION: Final = """\
## How to switch it off

For one statement, by a comment at the end of one of its lines:

```python
...  # halfstep: ignore[{code}]
```

For a file, by `# halfstep: ignore-file[{code}]` at its top; for a project, in `pyproject.toml`:

```toml
[tool.halfstep.lint]
ignore = ["{code}"]
```
"""
_SYNTAX_ERROR_SUMMARY: Final = "A file, or a cell of a notebook, is no Python."
_SYNTAX_ERROR_PAGE: Final = """\
# HS000 syntax_error

A file, or a cell of a notebook, is no Python.

Severity: error. No fix.

## Why

What does not parse cannot be checked, and a run over it would look clean. The message has the line, and what Python says about it.

It is the Python that `halfstep` runs in that decides: code for a newer version does not parse in an older one, and neither does Python 2.
A file that has none of the words of mixed precision, such as `autocast` or `scaler`, is not parsed at all, and gives no finding.

In a notebook, magics (`%time`, `!pip install`, `?`) are left out, cells in other languages (`%%bash`) too. A cell that does not parse
does not take the others along.

Even `--select` does not switch it off.

## How to switch it off

Leave the file out, or the rule, in `pyproject.toml`:

```toml
[tool.halfstep.lint]
exclude = ["vendored", "templates/**/*.py"]
ignore = ["HS000"]
```
"""
_INDEX_HEAD: Final = """\
# The rules of `halfstep lint`

Each is a mistake in mixed-precision code that is visible in the source. `halfstep lint --explain HS002` prints a page.

Errors break a run or its numbers, warnings probably do, and both are on by default. What is `info` is on when it is selected. A safe fix
cannot break code that works, and `--fix` makes it; one that is not safe contains a decision, and `--fix --unsafe-fixes` makes it, too.

| code | rule | severity | fix | what is wrong |
|---|---|---|---|---|
"""


def pages(rules: Sequence[AbstractRule]) -> Mapping[str, str]:
    """The pages by the names of their files: one for each rule, and the index."""
    return {
        _INDEX: index_page(rules),
        _file_name(SYNTAX_ERROR.name): _SYNTAX_ERROR_PAGE,
        **{_file_name(rule.name): rule_page(rule) for rule in rules},
    }


def rule_records(rules: Sequence[AbstractRule], *, page: Callable[[AbstractRule], str] | None = None) -> tuple[RuleRecord, ...]:
    """What there is to know about all rules; that of files which do not parse comes first.

    Args:
        rules: The rules.
        page: What makes a page; without it pages are empty: to make one, the rule is run on its examples.
    """
    syntax_error = RuleRecord(
        code=SYNTAX_ERROR.code,
        name=SYNTAX_ERROR.name,
        severity=SYNTAX_ERROR.severity,
        summary=_SYNTAX_ERROR_SUMMARY,
        page=_SYNTAX_ERROR_PAGE if page is not None else "",
    )
    return (
        syntax_error,
        *(
            RuleRecord(
                code=rule.code,
                name=rule.name,
                severity=rule.severity,
                summary=rule.summary,
                page=page(rule) if page is not None else "",
            )
            for rule in rules
        ),
    )


def explained(selector: str, rules: Sequence[AbstractRule]) -> str:
    """The page of the rule with a code or a name.

    Raises:
        ConfigurationError: There is no such rule.
    """
    if selector.upper() == SYNTAX_ERROR.code or selector == SYNTAX_ERROR.name:
        return _SYNTAX_ERROR_PAGE
    for rule in rules:
        if selector.upper() == rule.code or selector == rule.name:
            return rule_page(rule)
    names = [name for rule in known_rules(rules) for name in (rule.code, rule.name)]
    raise ConfigurationError(
        f"There is no rule {selector!r}.{did_you_mean(selector, known=names)} Name one by its code or its name; halfstep lint --list-rules "
        f"shows them."
    )


def rule_page(rule: AbstractRule) -> str:
    """All that there is to say about a rule, as Markdown."""
    parts = [
        f"# {rule.code} {rule.name}\n",
        f"{rule.summary}\n",
        f"Severity: {rule.severity}{'; off unless it is selected' * (rule.severity == 'info')}. {_fix_sentence(rule)}\n",
        "## Why\n",
        f"{rule.explanation.strip()}\n",
        *(part for number, bad in enumerate(rule.bad, start=1) for part in _bad_parts(rule, bad, number)),
        *(["## Right as it is\n"] * bool(rule.good)),
        *(_fenced(good) for good in rule.good),
        _SUPPRESSION.format(code=rule.code),
    ]
    return "\n".join(parts)


def index_page(rules: Sequence[AbstractRule]) -> str:
    """A table of all rules, with links to their pages."""
    rows = [
        (SYNTAX_ERROR.code, SYNTAX_ERROR.name, SYNTAX_ERROR.severity, "no", _SYNTAX_ERROR_SUMMARY),
        *((rule.code, rule.name, rule.severity, _fix_word(rule), rule.summary) for rule in rules),
    ]
    return _INDEX_HEAD + "".join(
        f"| {code} | [{name}]({_file_name(name)}) | {severity} | {fix} | {summary.replace('|', chr(92) + '|')} |\n"
        for code, name, severity, fix, summary in rows
    )


def main(words: Sequence[str]) -> None:
    """Writes the pages into a folder, and removes those of rules that there are no more.

    Args:
        words: The folder.

    Raises:
        ConfigurationError: It is not one folder, or cannot be written to.
    """
    if len(words) != 1:
        raise ConfigurationError("Name one folder for the pages, such as docs/rules.")
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    made = pages(RULES)
    for name, text in made.items():
        write_text(folder / name, text)
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()


def _file_name(name: str) -> str:
    return f"{name}.md"


def _bad_parts(rule: AbstractRule, bad: Bad, number: int) -> Iterator[str]:
    which = f" {number}" if len(rule.bad) > 1 else ""
    yield f"## Wrong{which}\n"
    yield _fenced(_marked(bad, rule.code))
    if bad.fixed is None:
        yield "No fix is known for this.\n"
        return
    safety = _safety(rule, bad)
    yield f"Fixed by {'`--fix`, which is safe' if safety == 'safe' else '`--fix --unsafe-fixes`: look at what it decides'}:\n"
    yield _fenced(bad.fixed)


def _marked(bad: Bad, code: str) -> str:
    lines = bad.code.rstrip("\n").split("\n")
    lines[bad.line - 1] += f"  # <- {code}"
    return "\n".join(lines)


def _fenced(code: str) -> str:
    return f"```python\n{code.strip(chr(10))}\n```\n"


def _safety(rule: AbstractRule, bad: Bad) -> Safety | None:
    """How safe the fix of an example is: the rule says it of each finding, not of itself."""
    findings = list(rule.check(parse_module(bad.code)))
    return next((finding.fix.safety for finding in findings if finding.fix is not None), None)


def _safeties(rule: AbstractRule) -> set[Safety | None]:
    return {_safety(rule, bad) if bad.fixed is not None else None for bad in rule.bad}


def _fix_sentence(rule: AbstractRule) -> str:
    safeties = _safeties(rule)
    if {"safe", "unsafe"} <= safeties:
        sentence = "Some fixes are safe, others contain a decision."
    elif "safe" in safeties:
        sentence = "The fix is safe."
    elif "unsafe" in safeties:
        sentence = "The fix contains a decision, and is made with `--unsafe-fixes`."
    else:
        return "No fix."
    return f"{sentence}{' Not every case has one.' * (None in safeties)}"


def _fix_word(rule: AbstractRule) -> str:
    words = [word for word in ("safe", "unsafe") if word in _safeties(rule)]
    return " or ".join(words) or "no"


if __name__ == "__main__":
    main(sys.argv[1:])
