"""One file through all rules: what they find in it, and what it becomes when that is fixed."""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

from halfstep.lint.module import Module, parse_module
from halfstep.lint.notebooks import read_notebook
from halfstep.lint.rules.rule import AbstractRule, Finding, Safety
from halfstep.lint.selection import SYNTAX_ERROR, known_rules
from halfstep.lint.source import AbstractSource, Fault, Rewriting, read_script
from halfstep.lint.suppressions import Suppressions, header_lines, leading_suppressions, read_suppressions
from halfstep.records import Violation

__all__ = ["CheckedFile", "RuleBook", "check_content", "check_source", "may_hold_amp", "read_source"]

# Every finding needs an autocast region, a scaler, a half type or Apex, and each of those is spelled with one of these words somewhere in
# its file. A file without them is not even decoded: nine of ten in a usual project. `caler` stands for `scaler` and `Scaler`.
_WORDS: Final = (b"autocast", b"caler", b"float16", b"fp16", b"bf16", b"unscale_", b".scale(", b"apex", b"HalfTensor")
# Words that are parts of many others. What stands before one is looked at last: a search for plain letters is fifteen times as fast.
_SHORT_WORDS: Final = (re.compile(rb"amp(?<![A-Za-z]amp)(?![A-Za-z])"), re.compile(rb"half(?<![A-Za-z]half)(?![A-Za-z])"))
_ESCAPED_ASCII: Final = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_ESCAPE: Final = re.compile(rb"\\.")
_SEAM: Final = re.compile(rb'"\s*,\s*"')
# Rules about any training code, which are off by default, and what such code cannot do without.
_WORDS_OF_RULES: Final[Mapping[str, bytes]] = MappingProxyType({"HS018": b"backward"})
_PARSER_ERRORS: Final = (SyntaxError, ValueError, RecursionError, MemoryError)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleBook:
    """The rules that a file is checked by.

    Attributes:
        rules: All rules.
        codes: The codes of those that are on.
    """

    rules: tuple[AbstractRule, ...]
    codes: frozenset[str]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """What came of a file.

    Attributes:
        path: The file, as users are shown it.
        violations: What is wrong with it; where it was fixed, what is left.
        warnings: What is wrong with its comments for halfstep, and fixes that could not be made.
        failures: What could not be checked, and why.
        fixed: How many findings were fixed.
        rewriting: The fixed file; `None` where nothing was fixed.
        unfixed: What is wrong with the file as long as the fixed one is not written.
    """

    path: str
    violations: tuple[Violation, ...] = ()
    warnings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    fixed: int = 0
    rewriting: Rewriting | None = None
    unfixed: tuple[Violation, ...] = ()

    def unsaved(self, failure: str) -> CheckedFile:
        """What came of the file where the fixed one could not be written.

        Args:
            failure: Why.
        """
        return replace(self, violations=self.unfixed, failures=(*self.failures, failure), fixed=0, rewriting=None, unfixed=())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What the rules say about a text."""

    module: Module | None = None
    found: tuple[tuple[Finding, AbstractRule], ...] = ()
    faults: tuple[Fault, ...] = ()
    failures: tuple[str, ...] = ()
    suppressions: Suppressions = Suppressions()  # noqa: RUF009 - it is frozen


def may_hold_amp(content: bytes, *, codes: frozenset[str] = frozenset()) -> bool:
    """Whether a file has any of the words without which no rule can find anything.

    Args:
        content: The bytes of the file.
        codes: The codes of the rules that are on.

    Example:
        >>> may_hold_amp(b"import torch.cuda.amp"), may_hold_amp(b"for example in examples: print(example)")
        (True, False)
    """
    if any(word in content for word in _WORDS) or any(word.search(content) is not None for word in _SHORT_WORDS):
        return True
    return any(code in codes and word in content for code, word in _WORDS_OF_RULES.items())


def check_content(content: bytes, *, path: str, book: RuleBook, allowed: frozenset[Safety] = frozenset()) -> CheckedFile:
    """Checks the bytes of a file.

    Args:
        content: The bytes.
        path: The file, as users are shown it; a notebook ends with `.ipynb`.
        book: The rules.
        allowed: Which fixes are made; none by default.
    """
    is_notebook = _is_notebook(path)
    if not may_hold_amp(content, codes=book.codes) and not (is_notebook and may_hold_amp(_joined(content), codes=book.codes)):
        return CheckedFile(path=path)
    try:
        source = read_source(content, path=path)
    except _PARSER_ERRORS as error:
        fault = Fault.of(error)
        is_on = SYNTAX_ERROR.code in book.codes
        return CheckedFile(path=path, violations=(_syntax_violation(fault, path),) if is_on else ())
    return check_source(source, book, allowed=allowed)


def read_source(content: bytes, *, path: str) -> AbstractSource:
    """The source code in the bytes of a file.

    Raises:
        SyntaxError: They are in no encoding that Python can read, or are no notebook.
    """
    return read_notebook(content, path=path) if _is_notebook(path) else read_script(content, path=path)


def _is_notebook(path: str) -> bool:
    return Path(path).suffix == ".ipynb"


def _joined(content: bytes) -> bytes:
    """A notebook without what may stand in the middle of a word in its JSON, or before one like a letter: seams of lists, and escapes."""
    content = _ESCAPED_ASCII.sub(lambda match: bytes([int(match[1], 16)]), content)
    return _SEAM.sub(b"", _ESCAPE.sub(b"\n", content))


def check_source(source: AbstractSource, book: RuleBook, *, allowed: frozenset[Safety] = frozenset()) -> CheckedFile:
    """Checks source code, and fixes it where that is allowed.

    Args:
        source: The source code.
        book: The rules.
        allowed: Which fixes are made; none by default.
    """
    look = _look(source.text, source.path, book)
    checked = _checked(source, look, book)
    if not any(finding.fix is not None and finding.fix.safety in allowed for finding, _ in look.found):
        return checked
    try:
        fixed = _fixed(source, book, allowed)
    except Exception as error:
        failure = f"{source.path} could not be fixed and is as it was: {_bug(error)}"
        return replace(checked, failures=(*checked.failures, failure))
    if fixed is None or fixed.rewriting is None:
        return fixed or checked
    # One edit may be the fix of several findings, and one fix may uncover the next finding.
    gone = len(checked.violations) - len(fixed.violations)
    return replace(fixed, fixed=max(fixed.fixed, gone), unfixed=checked.violations)


def _fixed(source: AbstractSource, book: RuleBook, allowed: frozenset[Safety]) -> CheckedFile | None:
    """What came of a file that was fixed; `None` where nothing of it was."""
    # It loads libcst, which a check without fixes does not pay for.
    from halfstep.lint.fixing import Checked, fix_text  # noqa: PLC0415

    def check(text: str) -> Checked:
        look = _look(text, source.path, book)
        tree = ast.Module(body=[], type_ignores=[]) if look.module is None else look.module.tree
        return Checked(tree=tree, findings=[finding for finding, _ in look.found])

    result = fix_text(source.text, check=check, allowed=allowed)
    if result.text == source.text:
        return None
    rewriting = source.rewriting(result.text)
    if rewriting is None:
        warning = f"{source.path} is not fixed: the result cannot be written back, because of its encoding or because code left its cell."
        before = _checked(source, _look(source.text, source.path, book), book)
        return replace(before, warnings=(*before.warnings, warning))
    # What counts is what is going to lie on the disk.
    again = read_source(rewriting.content, path=source.path)
    look = _look(again.text, source.path, book)
    if look.module is None or len(again.faults) > len(source.faults):
        raise SyntaxError(f"the result does not parse ({[*look.faults, *again.faults][-1].reason})")
    return replace(_checked(again, look, book), fixed=result.applied, rewriting=rewriting)


def _look(text: str, path: str, book: RuleBook) -> _Look:
    known = known_rules(book.rules)
    try:
        module = parse_module(text)
    except _PARSER_ERRORS as error:
        fault = Fault.of(error, last_line=text.rstrip("\n").count("\n") + 1)
        return _Look(faults=(fault,), suppressions=leading_suppressions(text, known=known))
    suppressions = read_suppressions(text, module.tree, known=known)
    found: list[tuple[Finding, AbstractRule]] = []
    failures: list[str] = []
    for rule in book.rules:
        if rule.code not in book.codes or rule.code in suppressions.file:
            continue
        try:
            for finding in rule.check(module):
                found.append((finding, rule))
        except Exception as error:
            failures.append(f"{path}: the rule {rule.code} {rule.name} failed: {_bug(error)}")
    return _Look(
        module=module,
        found=tuple(pair for pair in found if not _is_suppressed(*pair, module, suppressions)),
        failures=tuple(failures),
        suppressions=suppressions,
    )


def _is_suppressed(finding: Finding, rule: AbstractRule, module: Module, suppressions: Suppressions) -> bool:
    if not suppressions.lines or isinstance(finding.node, ast.Module):
        return False
    return suppressions.cover(rule.code, header_lines(module.statement(finding.node), finding.node))


def _checked(source: AbstractSource, look: _Look, book: RuleBook) -> CheckedFile:
    violations: list[Violation] = []
    if SYNTAX_ERROR.code in book.codes and SYNTAX_ERROR.code not in look.suppressions.file:
        violations += [_syntax_violation(fault, source.path) for fault in source.faults]
        violations += [_syntax_violation(replace(fault, place=source.place(fault.place.line)), source.path) for fault in look.faults]
    if look.module is not None:
        lines = source.text.split("\n")
        violations += [_violation(finding, rule, look.module, source, lines) for finding, rule in look.found]
    return CheckedFile(
        path=source.path,
        violations=tuple(sorted(violations, key=_order)),
        warnings=tuple(_warnings(source, look.suppressions)),
        failures=look.failures,
    )


def _violation(finding: Finding, rule: AbstractRule, module: Module, source: AbstractSource, lines: Sequence[str]) -> Violation:
    node = finding.node
    # An argument list or a comprehension has no position of its own.
    placed = node if hasattr(node, "lineno") or isinstance(node, ast.Module) else module.statement(node)
    line: int = getattr(placed, "lineno", 1)
    # The parser counts bytes.
    column = len(lines[line - 1].encode()[: getattr(placed, "col_offset", 0)].decode(errors="replace")) + source.indentation(line) + 1
    place = source.place(line)
    return Violation(
        code=rule.code,
        rule=rule.name,
        path=source.path,
        line=place.line,
        column=column,
        message=source.shown(finding.message, place=place),
        fix=None if finding.fix is None else finding.fix.safety,
        cell=place.cell,
    )


def _syntax_violation(fault: Fault, path: str) -> Violation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Violation(
        code=SYNTAX_ERROR.code,
        rule=SYNTAX_ERROR.name,
        path=path,
        line=fault.place.line,
        column=fault.column,
        message=f"This does not parse in Python {version}, so that nothing in it was checked: {fault.reason}.",
        fix=None,
        cell=fault.place.cell,
    )


def _order(violation: Violation) -> tuple[int, int, int, str]:
    return (violation.cell or 0, violation.line, violation.column, violation.code)


def _warnings(source: AbstractSource, suppressions: Suppressions) -> Iterable[str]:
    for line, warning in suppressions.warnings:
        place = source.place(line)
        yield f"{source.path}:{'' if place.cell is None else f'cell {place.cell}:'}{place.line}: {warning}"


def _bug(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "code in it is nested too deeply. Take it apart, or leave the file out."
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}. This is a bug in halfstep; please report it with the code."
