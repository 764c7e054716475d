"""`halfstep lint`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.lint_output import print_findings, tell, write, write_code
from halfstep.errors import ConfigurationError
from halfstep.files import rewrite
from halfstep.lint.batches import Job, check_files
from halfstep.lint.checking import CheckedFile, RuleBook, check_content
from halfstep.lint.configuration import Configuration, Configurations
from halfstep.lint.discovery import find_files, is_left_out
from halfstep.lint.pages import explained, rule_records
from halfstep.lint.rules import RULES
from halfstep.lint.rules.rule import Safety
from halfstep.lint.selection import Selection, check_selectors, known_rules, selected_codes
from halfstep.lint.source import Change, read_content
from halfstep.records import Violation
from halfstep.report.lint import difference, rule_lines

__all__ = ["lint_command"]

_STANDARD_INPUT: Final = "-"
_SAFE: Final[frozenset[Safety]] = frozenset({"safe"})
_ANY: Final[frozenset[Safety]] = frozenset({"safe", "unsafe"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What the command line says.

    Attributes:
        fix: Whether files are fixed.
        diff: Whether what a fix would change is shown, and nothing is written.
        unsafe_fixes: Whether fixes that contain a decision are made, too; `None` where the configuration decides.
        selection: Which rules are on.
        format: How findings are written.
        statistics: Whether they are counted only.
        force_exclude: Whether what is named is left out, too, where a walk would leave it out.
    """

    fix: bool
    diff: bool
    unsafe_fixes: bool | None
    selection: Selection
    format: str
    statistics: bool
    force_exclude: bool

    def allowed(self, configuration: Configuration) -> frozenset[Safety]:
        """Which fixes are made in a file, or shown."""
        if not self.fix and not self.diff:
            return frozenset()
        unsafe = configuration.unsafe_fixes if self.unsafe_fixes is None else self.unsafe_fixes
        return _ANY if unsafe else _SAFE

    def codes(self, configuration: Configuration, path: Path) -> frozenset[str]:
        """The rules that are on for a file."""
        ignored = Selection(ignore=configuration.ignored_in(path))
        return selected_codes(known_rules(RULES), (configuration.selection, self.selection, ignored))


@final
@dataclass(slots=True, kw_only=True)
class _Tally:
    """What came of all files so far."""

    files: int = 0
    fixed: int = 0
    violations: list[Violation] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, checked: CheckedFile) -> None:
        """Takes what came of one more file."""
        self.files += 1
        self.fixed += checked.fixed
        self.violations += checked.violations
        self.failures += checked.failures
        self.changes += checked.rewriting.changes if checked.rewriting is not None else ()
        for warning in checked.warnings:
            tell(f"warning: {warning}")


@click.command("lint", short_help="Find mixed-precision mistakes in source code, and fix them.")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--fix", is_flag=True, help="Fix what can be fixed safely.")
@click.option("--unsafe-fixes/--no-unsafe-fixes", default=None, help="With --fix or --diff: fixes that contain a decision, too.")
@click.option("--diff", is_flag=True, help="Show what --fix would change, and write nothing.")
@click.option("--select", multiple=True, metavar="RULES", help="The rules that are on, in place of errors and warnings.")
@click.option("--ignore", multiple=True, metavar="RULES", help="Rules that are off.")
@click.option(
    "--format", "format", type=click.Choice(["text", "json", "github", "sarif"]), default="text", show_default=True, help="How to print."
)
@click.option("--statistics", is_flag=True, help="Print how many findings each rule has.")
@click.option("--explain", metavar="RULE", help="Print all that there is to say about a rule.")
@click.option("--list-rules", is_flag=True, help="Print all rules, each in a line.")
@click.option("--stdin-filename", metavar="FILE", help="What the code on standard input is called.")
@click.option("--force-exclude", is_flag=True, help="Leave out what is excluded, and what a walk passes over, even if it is named.")
@click.pass_context
def lint_command(context: click.Context, /, paths: tuple[str, ...], explain: str | None, *, list_rules: bool, **options: Any) -> None:
    """Find mistakes in mixed-precision code: clipping before unscaling, a scaler that is never saved, an update that is missing.

    PATH is a file, a notebook, a folder, or - for standard input; the current folder by default. In folders every .py and .ipynb is
    checked, except in environments, caches and build results. No code is run, and no torch is needed.

    RULES are codes (HS002), beginnings of codes (HS00), names (clip_before_unscale) or ALL, with commas between them. Errors and warnings
    are on by default. A rule fires only on what it can show: what it does not know, it says nothing about.

    \b
    A comment at the end of a line, or at the top of a file, switches rules off:
        scaler.step(optimizer)  # halfstep: ignore[HS002]
        # halfstep: ignore-file[HS002]

    \b
    A project does it in pyproject.toml:
        [tool.halfstep.lint]
        select = ["ALL"]
        ignore = ["sync_every_step"]
        exclude = ["vendored"]
        unsafe-fixes = false
        per-file-ignores = { "tests/**" = ["HS010"] }

    \b
    Examples:
        halfstep lint
        halfstep lint --diff train.py
        halfstep lint --fix --unsafe-fixes src notebooks/train.ipynb
        halfstep lint --explain clip_before_unscale
        halfstep lint --format github
        halfstep lint --fix --stdin-filename train.py - < train.py

    \b
    Exit codes: 0 nothing is wrong, 1 there are findings, or with --fix some are left,
    2 something could not be read or written, or a setting is wrong, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    if explain is not None:
        write(explained(explain.strip(), RULES), sys.stdout)
        context.exit(ExitCode.FINE)
    if list_rules:
        write("".join(f"{line}\n" for line in rule_lines(rule_records(RULES))), sys.stdout)
        context.exit(ExitCode.FINE)
    name = options.pop("stdin_filename")
    selection = Selection(select=_words(select) if (select := options.pop("select")) else None, ignore=_words(options.pop("ignore")))
    settings = _Settings(selection=selection, **options)
    _check_settings(settings)
    if _STANDARD_INPUT in paths or (name is not None and not paths):
        if len(paths) > 1:
            raise click.UsageError("- is standard input, and is checked alone. Leave out the other paths, or -.")
        context.exit(_lint_standard_input(name, settings))
    if name is not None:
        raise click.UsageError(f"--stdin-filename is what code on standard input is called. Leave it out, or {' '.join(paths)}.")
    context.exit(_lint_paths([Path(path) for path in paths or (".",)], settings))


def _words(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def _check_settings(settings: _Settings) -> None:
    known = known_rules(RULES)
    if settings.selection.select == ():
        raise click.UsageError("--select names no rule. Name some, or ALL, or leave --select out for errors and warnings.")
    check_selectors(settings.selection.select or (), known=known, where="--select")
    check_selectors(settings.selection.ignore, known=known, where="--ignore")
    if settings.diff and (settings.format != "text" or settings.statistics):
        raise click.UsageError("--diff shows changes, which have no other form. Leave out --diff, or --format and --statistics.")
    if settings.statistics and settings.format not in {"text", "json"}:
        raise click.UsageError(f"--statistics are printed as text or json, not as {settings.format}.")
    if settings.unsafe_fixes and not (settings.fix or settings.diff):
        tell("warning: --unsafe-fixes alone changes nothing. Add --fix or --diff.")


def _lint_paths(paths: Sequence[Path], settings: _Settings) -> ExitCode:
    configurations = Configurations(known_rules(RULES))
    discovery = find_files(paths, is_excluded=configurations.excludes, exclude_named=settings.force_exclude)
    tally = _Tally(failures=[f"Cannot look into {folder}." for folder in discovery.unread])
    if not discovery.files and not discovery.unread:
        tell(f"warning: there is no Python file to check in {', '.join(map(str, paths))}")
    for checked in check_files(list(_jobs(discovery.files, configurations, settings)), RULES):
        tally.add(_saved(checked, settings))
    return _conclude(tally, settings, is_code_printed=False)


def _jobs(files: Sequence[Path], configurations: Configurations, settings: _Settings) -> Iterator[Job]:
    for file in files:
        configuration = configurations.of(file)
        yield Job(path=file, codes=settings.codes(configuration, file), allowed=settings.allowed(configuration))


def _saved(checked: CheckedFile, settings: _Settings) -> CheckedFile:
    """Writes what was fixed; what cannot be written is a failure."""
    if checked.rewriting is None or settings.diff:
        return checked
    path = Path(checked.path)
    try:
        if read_content(path) != checked.rewriting.original:
            return checked.unsaved(f"{path} was changed while it was checked, and is not fixed. Check it again.")
        rewrite(path, checked.rewriting.content)
    except (ConfigurationError, OSError) as error:
        return checked.unsaved(str(error) if isinstance(error, ConfigurationError) else f"Cannot read {path}: {error.strerror or error}.")
    return checked


def _lint_standard_input(name: str | None, settings: _Settings) -> ExitCode:
    path = Path(name or _STANDARD_INPUT)
    configurations = Configurations(known_rules(RULES))
    configuration = configurations.of(path)
    try:
        content = read_content(None)
    except OSError as error:
        raise ConfigurationError(f"Cannot read code: {error.strerror or error}.") from error
    tally = _Tally()
    fixed = content
    if not (settings.force_exclude and name is not None and is_left_out(path, is_excluded=configurations.excludes)):
        book = RuleBook(rules=RULES, codes=settings.codes(configuration, path))
        checked = check_content(content, path=str(path), book=book, allowed=settings.allowed(configuration))
        tally.add(checked)
        fixed = checked.rewriting.content if checked.rewriting is not None else content
    is_code_printed = settings.fix and not settings.diff
    if is_code_printed:
        write_code(fixed, sys.stdout)
    return _conclude(tally, settings, is_code_printed=is_code_printed)


def _conclude(tally: _Tally, settings: _Settings, *, is_code_printed: bool) -> ExitCode:
    """Prints what was found; beside code on standard output, on standard error."""
    stream = sys.stderr if is_code_printed else sys.stdout
    if settings.diff:
        write_code(b"".join(difference(change.label, change.before, change.after) for change in tally.changes), sys.stdout)
        left = f"{len(tally.violations)} would be left; halfstep lint shows them" if tally.violations else "none would be left"
        tell(f"{tally.fixed} finding{'s' * (tally.fixed != 1)} would be fixed, {left}.")
    else:
        print_findings(
            tally.violations,
            stream=stream,
            format=settings.format,
            statistics=settings.statistics,
            files=tally.files,
            fixed=tally.fixed,
            failures=tally.failures,
        )
    for failure in tally.failures:
        tell(failure)
    if tally.failures:
        return ExitCode.COULD_NOT_RUN
    return ExitCode.FINDINGS if tally.violations or (settings.diff and tally.changes) else ExitCode.FINE
