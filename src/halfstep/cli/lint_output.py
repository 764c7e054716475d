"""How `halfstep lint` prints: into pipes, into terminals, and for readers that leave."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import halfstep
from halfstep.errors import ConfigurationError
from halfstep.lint.pages import rule_page, rule_records
from halfstep.lint.rules import RULES
from halfstep.records import Violation
from halfstep.report.lint import (
    finding_line,
    findings_json,
    github_lines,
    printable,
    statistics_json,
    statistics_lines,
    styled_line,
    summary_text,
)

__all__ = ["print_findings", "tell", "write", "write_code"]


def print_findings(
    violations: Sequence[Violation],
    *,
    stream: TextIO | None,
    format: str,
    statistics: bool,
    files: int,
    fixed: int,
    failures: Sequence[str],
) -> None:
    """Prints what was found.

    Args:
        violations: The findings.
        stream: Where to; `None` where it is closed.
        format: `text`, `json`, `github` or `sarif`.
        statistics: Whether findings are counted only.
        files: How many files were checked.
        fixed: How many findings were fixed.
        failures: What could not be checked.
    """
    if format == "text":
        if stream is not None and stream.isatty() and not statistics:
            _print_styled(violations, stream)
        else:
            lines = statistics_lines(violations) if statistics else map(finding_line, violations)
            write("".join(f"{line}\n" for line in lines), stream)
        write(f"{summary_text(violations, files=files, fixed=fixed)}\n", stream)
    else:
        write("".join(f"{part}\n" for part in _documents(violations, format, statistics=statistics, failures=failures)), stream)


def tell(message: str) -> None:
    """Prints a line on standard error, with the name of the program before it."""
    write(f"halfstep: {printable(message)}\n", sys.stderr)


def write(text: str, stream: TextIO | None) -> None:
    """Writes text; what the encoding lacks is escaped, a stream that is closed takes nothing, and a reader that has left is no error."""
    if stream is None:  # So it is in a process that was started without one.
        return
    encoding = stream.encoding or "utf-8"
    with _left_alone(stream):
        stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        stream.flush()


def write_code(code: bytes, stream: TextIO | None) -> None:
    """Writes code as it lies in files, byte for byte; a terminal gets nothing that could change it.

    Raises:
        ConfigurationError: The stream is closed, so that the code would be lost.
    """
    if stream is None:
        raise ConfigurationError("Cannot write code: standard output is closed.")
    if stream.isatty():
        text = code.decode(errors="backslashreplace")
        write(re.sub(r"[^\t\n]", lambda character: printable(character[0]), text), stream)
        return
    with _left_alone(stream):
        stream.flush()
        stream.buffer.write(code)
        stream.buffer.flush()


@contextmanager
def _left_alone(stream: TextIO) -> Iterator[None]:
    """Lets a reader leave before all is written."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _documents(violations: Sequence[Violation], format: str, *, statistics: bool, failures: Sequence[str]) -> Iterator[str]:
    if format == "json":
        yield statistics_json(violations) if statistics else findings_json(violations)
    elif format == "github":
        yield from github_lines(violations, rule_records(RULES))
    else:
        from halfstep.report.lint_sarif import findings_sarif  # noqa: PLC0415 - for the rare reader of it

        yield findings_sarif(violations, rule_records(RULES, page=rule_page), version=halfstep.__version__, failures=failures)


def _print_styled(violations: Sequence[Violation], stream: TextIO) -> None:
    from rich.console import Console  # noqa: PLC0415 - only where somebody sees colours

    console = Console(file=stream, highlight=False)
    with console.capture() as capture:
        for violation in violations:
            console.print(styled_line(violation), soft_wrap=True)
    write(capture.get(), stream)
