"""Comments that switch rules off: `# halfstep: ignore[HS002]` for a statement, `# halfstep: ignore-file[HS002]` for a file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from halfstep.errors import did_you_mean
from halfstep.lint.selection import RuleName, matches

__all__ = ["Suppressions", "header_lines", "leading_suppressions", "read_suppressions"]

# What any such comment contains. Most files have none, and are not taken apart to look for one.
_MARK: Final = re.compile(r"halfstep\s*:|halfstep\s+ignore", re.IGNORECASE)
_COMMENT: Final = re.compile(r"#\s*halfstep:\s*(?P<word>[\w-]+)(?P<list>\s*\[[^\]]*\]?)?")
# What looks like one and is none, so that somebody would wait for it to have an effect.
_NEARLY: Final = re.compile(
    r"(?P<sign>#[\s:!]*)?halfstep\s*(?::\s*)?ignore(?:-file)?(?![\w-])(?:\s*\[(?P<list>[^\]]*)|(?(sign)|(?!)))", re.IGNORECASE
)
# What follows `ignore` where brackets were meant, beside the names of rules.
_SIGNS: Final = (":", "=", "(", "{", "<")
_CODE: Final = re.compile(r"HS\d+", re.IGNORECASE)
_BEGINNINGS: Final = ("HS", "hs")
_WORD: Final = re.compile(r"\w+")
_WORDS: Final = ("ignore", "ignore-file")
_TRIVIA: Final = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressions:
    """What the comments of a file switch off.

    Attributes:
        file: The codes of rules that are off in the whole file.
        lines: The codes of rules that are off in statements with a comment at the end of this line.
        warnings: What is wrong with a comment, each with its line.
    """

    file: frozenset[str] = frozenset()
    lines: tuple[tuple[int, frozenset[str]], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()

    def cover(self, code: str, lines: range) -> bool:
        """Whether a finding is switched off.

        Args:
            code: The code of its rule.
            lines: The lines whose comments count for it.
        """
        return code in self.file or any(line in lines and code in codes for line, codes in self.lines)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Comment:
    """A comment that may be one of ours."""

    text: str
    line: int
    is_alone: bool
    is_near_top: bool


def read_suppressions(text: str, tree: ast.Module, *, known: Sequence[RuleName]) -> Suppressions:
    """The comments of a file that switch rules off.

    Args:
        text: The file.
        tree: Its syntax tree.
        known: All rules.

    Example:
        >>> text = "scaler.step(opt)  # halfstep: ignore[HS000]"
        >>> from halfstep.lint.selection import SYNTAX_ERROR
        >>> read_suppressions(text, ast.parse(text), known=[SYNTAX_ERROR]).cover("HS000", range(1, 2))
        True
    """
    if not _may_hold_comment(text):
        return Suppressions()
    return _collected(_comments(text, _last_line_of_top(tree)), known)


def leading_suppressions(text: str, *, known: Sequence[RuleName]) -> Suppressions:
    """Those in the comments that a file begins with: all that can be told of one that does not parse."""
    if not _may_hold_comment(text):
        return Suppressions()
    comments = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.startswith("#"):
            break
        comments.append(_Comment(text=line, line=number, is_alone=True, is_near_top=True))
    return _collected(iter(comments), known)


def header_lines(statement: ast.stmt, node: ast.AST) -> range:
    """The lines of a statement whose comments count for a finding in it.

    Those are all of its lines; of one that holds other statements, such as `with` or `def`, the lines up to its colon.

    Args:
        statement: The innermost statement around the finding.
        node: The part of it that is the finding.
    """
    line: int = getattr(node, "lineno", statement.lineno)
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not body:
        return range(min(line, statement.lineno), (statement.end_lineno or statement.lineno) + 1)
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min([line, statement.lineno, *(decorator.lineno for decorator in decorators)])
    header = range(first, max(_first_line(body[0]) - 1, statement.lineno) + 1)
    if line in header:
        return header
    return next((lines for lines in _lower_headers(statement) if line in lines), range(line, line + 1))


def _lower_headers(statement: ast.stmt) -> Iterator[range]:
    """The lines of each `case` and `except` of a statement, from behind what is above them up to their colon."""
    parts: list[ast.match_case | ast.ExceptHandler] = [*getattr(statement, "cases", []), *getattr(statement, "handlers", [])]
    above: ast.AST = statement.subject if isinstance(statement, ast.Match) else getattr(statement, "body", [statement])[-1]
    for part in parts:
        begin: int = getattr(above, "end_lineno", 0) + 1
        yield range(begin, max(_first_line(part.body[0]) - 1, begin) + 1)
        above = part.body[-1]


def _first_line(node: ast.AST) -> int:
    """The line that a statement, or a case, begins in."""
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    line: int = getattr(node, "lineno", 1)
    return min([line, *(decorator.lineno for decorator in decorators)])


def _may_hold_comment(text: str) -> bool:
    # A search without regard to case is twenty times as slow, and most files have no such word at all.
    return "halfstep" in text.lower() and _MARK.search(text) is not None


def _last_line_of_top(tree: ast.Module) -> int | None:
    """The line that the first statement begins in which is neither an import nor stands for nothing; `None` where there is none."""
    for statement in tree.body:
        # A docstring, and in notebooks the mark of a cell and a magic.
        is_nothing = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name)
        if not is_nothing and not isinstance(statement, ast.Import | ast.ImportFrom):
            return _first_line(statement)
    return None


def _comments(text: str, end_of_top: int | None) -> Iterator[_Comment]:
    line_with_code = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            if token.type == tokenize.COMMENT and _MARK.search(token.string):
                is_near_top = end_of_top is None or line < end_of_top
                yield _Comment(text=token.string, line=line, is_alone=line_with_code != line, is_near_top=is_near_top)
            elif token.type not in _TRIVIA:
                line_with_code = token.end[0]
    except (tokenize.TokenError, SyntaxError):
        return  # The parser is more patient than its copy in Python: what was found so far counts.


def _collected(comments: Iterator[_Comment], known: Sequence[RuleName]) -> Suppressions:
    file: set[str] = set()
    lines: list[tuple[int, frozenset[str]]] = []
    warnings: list[tuple[int, str]] = []
    for comment in comments:
        found = list(_COMMENT.finditer(comment.text))
        nearly = _NEARLY.search(comment.text) if not found else None
        if nearly is not None:
            meant = nearly["list"] or known[-1].code
            warnings.append((comment.line, f"{_shortened(comment.text)} switches nothing off. Write # halfstep: ignore[{meant}]."))
        for match in found:
            codes, faults = _codes(match, comment, known)
            warnings += [(comment.line, fault) for fault in faults]
            if match["word"] == "ignore-file":
                file |= codes
            elif codes:
                lines.append((comment.line, codes))
    return Suppressions(file=frozenset(file), lines=tuple(lines), warnings=tuple(warnings))


def _codes(match: re.Match[str], comment: _Comment, known: Sequence[RuleName]) -> tuple[frozenset[str], list[str]]:
    """What a comment switches off, and what is wrong with it."""
    word, listed = match["word"], match["list"]
    misplaced = _misplaced(comment, word)
    if misplaced:
        return frozenset(), [misplaced]
    if word not in _WORDS:
        hint = did_you_mean(word, known=_WORDS)  # It may be a sentence about halfstep.
        return frozenset(), [f"# halfstep: {word} is no comment that halfstep lint knows.{hint}"] if hint else []
    if listed is None:
        meant = _meant(comment.text[match.end() :], known)
        if meant is not None:
            return frozenset(), [f"{_shortened(comment.text[match.start() :])} switches nothing off. Write # halfstep: {word}[{meant}]."]
        return frozenset(rule.code for rule in known), []
    selectors = [selector.strip() for selector in listed.strip().strip("[]").split(",") if selector.strip()]
    if not listed.endswith("]") or not selectors:
        return frozenset(), [f"# halfstep: {word}{listed} switches nothing off. Write # halfstep: {word}[{known[-1].code}]."]
    codes = {selector: frozenset(rule.code for rule in known if matches(selector, rule)) for selector in selectors}
    names = [name for rule in known for name in (rule.code, rule.name)]
    faults = [
        f"# halfstep: {word}[...] names {selector!r}, which is no rule."
        f"{' Write a comma between two.' if ' ' in selector else did_you_mean(selector, known=names)}"
        for selector in selectors
        if not codes[selector]
    ]
    return frozenset().union(*codes.values()), faults


def _meant(rest: str, known: Sequence[RuleName]) -> str | None:
    """The rules that stand behind `ignore` without brackets; `None` where it is a reason, or nothing."""
    rest = rest.partition("#")[0]
    words = _WORD.findall(rest)
    rules = [word for word in words if any(word.upper() == rule.code or word == rule.name for rule in known)]
    if rules:
        return ", ".join(rules)
    is_meant = rest.startswith(_SIGNS) or any(map(_CODE.fullmatch, words)) or (words and words[0] in _BEGINNINGS)
    return known[-1].code if is_meant else None


def _shortened(comment: str) -> str:
    return comment if len(comment) <= 60 else f"{comment[:57]}..."


def _misplaced(comment: _Comment, word: str) -> str:
    if word == "ignore-file" and not comment.is_near_top:
        return "# halfstep: ignore-file has no effect below the first statement. Move it to the top of the file."
    if word == "ignore" and comment.is_alone:
        return "# halfstep: ignore has no effect on a line of its own. Move it to the end of the line that it is about."
    return ""
