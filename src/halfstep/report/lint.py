"""What `halfstep lint` found: as lines for people, as JSON, as annotations of GitHub, and counted."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import diff_bytes, unified_diff
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from halfstep.records import RuleRecord, Severity, Violation

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "difference",
    "finding_line",
    "findings_json",
    "github_lines",
    "place_text",
    "printable",
    "rule_lines",
    "statistics_json",
    "statistics_lines",
    "styled_line",
    "summary_text",
]

# Bytes of a name that would end it, or its line, in a difference.
_ODD_BYTES: Final = re.compile(rb'[\x00-\x1f\x7f"\\]')
_MARKS: Final = MappingProxyType({"safe": " [fixable]", "unsafe": " [fixable with --unsafe-fixes]", None: ""})
_GITHUB_LEVELS: Final[Mapping[Severity, str]] = MappingProxyType({"error": "error", "warning": "warning", "info": "notice"})
# Where GitHub's workflow commands end a message, and where a property of it.
_GITHUB_MESSAGE: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_GITHUB_PROPERTY: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def place_text(violation: Violation) -> str:
    """Where it is, as editors and terminals read it.

    Example:
        >>> found = Violation(code="HS002", rule="clip_before_unscale", path="a.ipynb", line=3, column=5, message="", fix=None, cell=7)
        >>> place_text(found)
        'a.ipynb:cell 7:3:5'
    """
    cell = "" if violation.cell is None else f"cell {violation.cell}:"
    return printable(f"{violation.path}:{cell}{violation.line}:{violation.column}")


def finding_line(violation: Violation) -> str:
    """One finding in one line.

    Example:
        >>> found = Violation(code="HS002", rule="clip_before_unscale", path="train.py", line=3, column=5, message="It is.", fix="safe")
        >>> finding_line(found)
        'train.py:3:5: HS002 clip_before_unscale It is. [fixable]'
    """
    return printable(f"{place_text(violation)}: {violation.code} {violation.rule} {violation.message}{_MARKS[violation.fix]}")


def styled_line(violation: Violation) -> Text:
    """The same line in colours, for a terminal."""
    # It is loaded only where somebody sees colours.
    from rich.text import Text  # noqa: PLC0415

    parts = (
        (place_text(violation), "bold"),
        (": ", ""),
        (printable(violation.code), "bold red"),
        (" ", ""),
        (printable(violation.rule), "red"),
        (f" {printable(violation.message)}", ""),
        (_MARKS[violation.fix], "green"),
    )
    return Text.assemble(*parts)


def summary_text(violations: Sequence[Violation], *, files: int, fixed: int = 0) -> str:
    """What the findings come to, in a line.

    Args:
        violations: The findings that are left.
        files: How many files were checked.
        fixed: How many findings were fixed.

    Example:
        >>> summary_text([], files=12)
        'No findings in 12 files.'
    """
    begin = f"Fixed {_count(fixed, 'finding')}. " if fixed else ""
    if not violations:
        return f"{begin}No findings{' are left' * bool(fixed)} in {_count(files, 'file')}."
    begin += f"{_count(len(violations), 'finding')}{(' is left' if len(violations) == 1 else ' are left') * bool(fixed)}"
    where = len({violation.path for violation in violations})
    text = f"{begin} in {where:,} of {_count(files, 'file')}."
    fixes = Counter(violation.fix for violation in violations)
    safe, unsafe = fixes["safe"], fixes["unsafe"]
    if safe and unsafe:
        return f"{text} --fix fixes {safe:,}, --fix --unsafe-fixes {unsafe:,} more."
    if safe or unsafe:
        return f"{text} --fix{' --unsafe-fixes' * bool(unsafe)} fixes {safe or unsafe:,}."
    return text


def findings_json(violations: Iterable[Violation]) -> str:
    """All findings as a list of objects; those in notebooks have the number of the cell, too."""
    return json.dumps([_plain(violation) for violation in violations], indent=2)


def github_lines(violations: Iterable[Violation], rules: Sequence[RuleRecord]) -> Iterator[str]:
    """Findings as workflow commands, which GitHub shows beside the lines of a pull request.

    Args:
        violations: The findings.
        rules: What is known about their rules.

    Example:
        >>> found = Violation(code="HS002", rule="clip_before_unscale", path="train.py", line=3, column=5, message="100%.", fix=None)
        >>> print(*github_lines([found], []))
        ::error file=train.py,line=3,col=5,title=halfstep HS002 clip_before_unscale::train.py:3:5: HS002 clip_before_unscale 100%25.
    """
    levels = {rule.code: _GITHUB_LEVELS[rule.severity] for rule in rules}
    for violation in violations:
        # Lines of a cell are none of the file, and a line must be named.
        line, column = (violation.line, violation.column) if violation.cell is None else (1, 1)
        path = violation.path.translate(_GITHUB_PROPERTY)
        title = f"halfstep {violation.code} {violation.rule}".translate(_GITHUB_PROPERTY)
        text = f"{place_text(violation)}: {violation.code} {violation.rule} {violation.message}".translate(_GITHUB_MESSAGE)
        yield f"::{levels.get(violation.code, 'error')} file={path},line={line},col={column},title={title}::{text}"


def statistics_lines(violations: Sequence[Violation]) -> Iterator[str]:
    """How many findings each rule has, most first.

    Example:
        >>> found = Violation(code="HS002", rule="clip_before_unscale", path="train.py", line=3, column=5, message="It is.", fix="safe")
        >>> print(*statistics_lines([found, found]))
        2  HS002 clip_before_unscale [2 fixable]
    """
    counted = _statistics(violations)
    width = max((len(f"{each['count']:,}") for each in counted), default=0)
    for each in counted:
        fixes = (f"{each['safe']:,} fixable" if each["safe"] else "", f"{each['unsafe']:,} with --unsafe-fixes" if each["unsafe"] else "")
        fixable = ", ".join(filter(None, fixes))
        yield f"{each['count']:>{width},}  {each['code']} {each['rule']}{f' [{fixable}]' * bool(fixable)}"


def statistics_json(violations: Sequence[Violation]) -> str:
    """The same as a list of objects."""
    return json.dumps(_statistics(violations), indent=2)


def rule_lines(rules: Sequence[RuleRecord]) -> Iterator[str]:
    """All rules, one in a line: code, severity, name and what is wrong."""
    names = max((len(rule.name) for rule in rules), default=0)
    for rule in rules:
        yield f"{rule.code}  {rule.severity:<7}  {rule.name:<{names}}  {rule.summary}"


def difference(label: str, before: bytes, after: bytes) -> bytes:
    r"""The difference between two files, as `diff -u` and `git diff` show it, byte for byte, so that it can be applied.

    Args:
        label: What they are called.
        before: The old file.
        after: The new file.

    Example:
        >>> print(difference("train.py", b"a = 1", b"a = 2").decode(), end="")
        --- train.py
        +++ train.py
        @@ -1 +1 @@
        -a = 1
        \ No newline at end of file
        +a = 2
        \ No newline at end of file
    """
    name = _diff_name(label)
    lines = diff_bytes(unified_diff, _lines(before), _lines(after), name, name)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def printable(text: str) -> str:
    """Text that cannot change a terminal or begin a line of its own."""
    return "".join(character if character.isprintable() else " " for character in text)


def _lines(content: bytes) -> list[bytes]:
    # As `patch` sees them. Not splitlines(): it breaks at carriage returns, too.
    return [line for line in re.split(rb"(?<=\n)", content) if line]


def _diff_name(label: str) -> bytes:
    """A name as git writes it in differences: in quotes if it would not stay in its line, and with a tab behind it if it has blanks."""
    name = os.fsencode(label)
    if _ODD_BYTES.search(name):
        return b'"%s"' % _ODD_BYTES.sub(lambda odd: b"\\%03o" % odd[0][0], name)
    return name + b"\t" * (b" " in name)


def _plain(violation: Violation) -> dict[str, Any]:
    plain = {name: getattr(violation, name) for name in ("code", "rule", "path", "line", "column", "message", "fix")}
    return plain if violation.cell is None else {**plain, "cell": violation.cell}


def _statistics(violations: Sequence[Violation]) -> list[dict[str, Any]]:
    counts = Counter((violation.code, violation.rule) for violation in violations)
    fixes = Counter((violation.code, violation.fix) for violation in violations)
    return [
        {"code": code, "rule": rule, "count": count, "safe": fixes[code, "safe"], "unsafe": fixes[code, "unsafe"]}
        for (code, rule), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
