"""What notebooks have beyond Python: magics, shell commands and help, masked so that the rest of a cell parses."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Final, final

__all__ = ["MaskedCell", "mask_cell", "named", "prefixed", "unmasked"]

# Cell magics below which there is Python that runs in the notebook. Below any other there is another language, or text.
_PYTHON_CELLS: Final = frozenset({"capture", "prun", "time", "timeit"})
_NOTHING: Final[Mapping[int, str]] = MappingProxyType({})
_MASK: Final = "__halfstep_magic_{}__"
_MASKED: Final = re.compile(r"(?:# )?__halfstep_magic_(\d+)__")
_LINE_MAGIC: Final = re.compile(r"\s*[%!?,;/]|[^#'\"]*\?{1,2}\s*(?:#.*)?$|\s*[%\w.*\[\]'\"]+\?{1,2}\s*(?:#.*)?$")
_ASSIGNMENT: Final = re.compile(
    r"""'[^']*'|"[^"]*"|\#.*|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<sign>(?<![<>!=:+\-*/%&|^@])=(?!=)\s*(?P<magic>[%!](?!=).)?)"""
)
# What IPython runs without a mark: such a line is no Python, or the cell would parse.
_SHELL: Final = re.compile(r"(?:pip3?|conda|mamba|uv|apt|apt-get|git|wget|cd|ls|mkdir|rm|cp|mv|cat)\s+[\w./~$-]")
# What IPython takes away from pasted code: the prompts of Python and its own.
_PROMPTS: Final = (
    (re.compile(r"\s*>>>"), re.compile(r"\s*(?:>>>|\.\.\.)[ \t]?")),
    (re.compile(r"In \[\d+\]: "), re.compile(r"In \[\d+\]: ?|\s*\.{3,}: ?")),
)
_TOKEN: Final = re.compile(r"#.*|[rRbBuUfFtT]{0,2}(?P<quote>\"\"\"|'''|\"|')|(?P<open>[([{])|(?P<close>[)\]}])|\\$")
_ENDS: Final = MappingProxyType(
    {quote: re.compile(rf"(?:[^\\]|\\.)*?{quote}", re.DOTALL) for quote in ('"', "'", '"""', "'''")},
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedCell:
    """A cell that parses, or what is wrong with it.

    Attributes:
        text: The cell with every magic in it replaced; lines and the columns of all other code stay. Empty lines where it is no Python.
        hidden: The lines, or ends of lines, that were replaced, by their number.
        prefixes: What was taken away from the beginning of each line, as IPython does it with prompts and with the indentation of a whole
            cell; empty where nothing was.
        error: What the parser says of a cell that is neither Python nor a magic.
    """

    text: str
    hidden: Mapping[int, str]
    prefixes: tuple[str, ...] = ()
    error: Exception | None = None


def mask_cell(text: str, *, first: int) -> MaskedCell:
    r"""A cell in which only Python is left.

    Args:
        text: The cell, in which every line ends with `\n`.
        first: The number of the first magic in it: each in a notebook has another.

    Example:
        >>> mask_cell("%matplotlib inline\nx = 1", first=0).text
        '__halfstep_magic_0__\nx = 1'
        >>> unmasked("if x:\n    __halfstep_magic_0__", {0: "%matplotlib inline"})
        'if x:\n    %matplotlib inline'
    """
    error = _error(text)
    if error is None:
        return MaskedCell(text=text, hidden=_NOTHING)
    lines = text.split("\n")
    failures: list[Exception] = []
    for code in _readings(lines):
        magic = re.match(r"\s*%%(\w*)", "\n".join(code))
        if magic is not None and magic[1] not in _PYTHON_CELLS:
            return MaskedCell(text="\n" * (len(lines) - 1), hidden=_NOTHING)
        hidden: dict[int, str] = {}
        masked = "\n".join(_masked(code, hidden, first))
        error = _error(masked)
        if error is None:
            prefixes = () if code == lines else tuple(line[: len(line) - len(kept)] for line, kept in zip(lines, code, strict=True))
            return MaskedCell(text=masked, hidden=MappingProxyType(hidden), prefixes=prefixes)
        failures.append(error)
    return MaskedCell(text="\n" * (len(lines) - 1), hidden=_NOTHING, error=failures[0])


def _readings(lines: list[str]) -> Iterator[list[str]]:
    """The lines as they are, and without what IPython takes away from their beginnings."""
    yield lines
    code = _unindented(lines)
    if code != lines:
        yield code
    for begin, prompt in _PROMPTS:
        if any(begin.match(line) for line in code):
            yield [line[match.end() :] if (match := prompt.match(line)) else line for line in code]


def _unindented(lines: list[str]) -> list[str]:
    """The lines without the indentation of the first one, where they have it; what is below a cell magic has one of its own."""
    place = next((place for place, line in enumerate(lines) if line.strip()), None)
    if place is None:
        return lines
    first = lines[place]
    code = [line.removeprefix(first[: len(first) - len(first.lstrip())]) for line in lines]
    return code[: place + 1] + _unindented(code[place + 1 :]) if code[place].startswith("%%") else code


def prefixed(text: str, prefixes: Sequence[str], *, like: str) -> str:
    r"""The text with what was taken away from its lines back in place.

    Args:
        text: The text.
        prefixes: What was taken away from each line of an older version of it.
        like: That version. A line that takes the place of another begins as that one did, and a new one as the line before it.

    Example:
        >>> prefixed("x = 2\ny = 3\nz = 4", [">>> ", "... "], like="x = 1\ny = 3")
        '>>> x = 2\n... y = 3\n... z = 4'
    """
    if not prefixes:
        return text
    old, new = like.split("\n"), text.split("\n")
    kept = {
        new_first + place: prefixes[old_first + place]
        for _, old_first, old_last, new_first, new_last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        for place in range(min(old_last - old_first, new_last - new_first))
    }
    first = before = next(filter(None, prefixes), "")
    lines: list[str] = []
    for place, line in enumerate(new):
        if place in kept:
            before = kept[place] if line.strip() else before
            lines.append(kept[place] + line)
        else:
            # What begins as if it had the indentation of the cell would lose it.
            prefix = before or (first if line.startswith(first) else "")
            lines.append(line and prefix + line)
    return "\n".join(lines)


def unmasked(text: str, hidden: Mapping[int, str]) -> str | None:
    """The text with its magics back in place; `None` where one is gone, is there twice or is another cell's."""
    if sorted(int(number) for number in _MASKED.findall(text)) != sorted(hidden):
        return None
    return _MASKED.sub(lambda match: hidden[int(match[1])], text)


def named(text: str, hidden: Mapping[int, str]) -> str:
    """A message with the magics that it names, as they are in the notebook."""
    return _MASKED.sub(lambda match: hidden.get(int(match[1]), match[0]), text)


def _error(text: str) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error
    return None


def _masked(lines: list[str], hidden: dict[int, str], first: int) -> list[str]:
    scanner = _Scanner()
    masked: list[str] = []
    is_continued = False
    for line in lines:
        split = 0 if is_continued else _magic_start(line) if scanner.is_between else None
        if split is None:
            scanner.read(line)
            masked.append(line)
            continue
        number = first + len(hidden)
        split = split or len(line) - len(line.lstrip())
        hidden[number] = line if is_continued else line[split:]
        mask = _MASK.format(number)
        # A line that goes on a magic is hidden in a comment, which may stand anywhere.
        masked.append(f"# {mask}" if is_continued else f"{line[:split]}{mask}")
        is_continued = line.endswith("\\")
    return masked


def _magic_start(line: str) -> int | None:
    """Where in a line a magic begins: 0 for all of it, `None` where there is none."""
    if _LINE_MAGIC.match(line) or _SHELL.match(line):
        return 0
    depth = 0
    for token in _ASSIGNMENT.finditer(line):
        depth += bool(token["open"]) - bool(token["close"])
        if token["sign"] and not depth:
            return token.start("magic") if token["magic"] else None
    return None


@final
class _Scanner:
    """Tells whether the next line begins a statement, or goes on with a text, a bracket or a line."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_continued = False

    @property
    def is_between(self) -> bool:
        """Whether the next line begins a statement."""
        return not (self._depth > 0 or self._quote or self._is_continued)

    def read(self, line: str) -> None:
        """Takes one more line."""
        self._is_continued = False
        place = 0
        while place < len(line):
            if self._quote:
                end = _ENDS[self._quote].match(line, place)
                if end is None:
                    break
                self._quote, place = "", end.end()
                continue
            token = _TOKEN.search(line, place)
            if token is None:
                break
            place = token.end()
            self._quote = token["quote"] or ""
            self._depth += bool(token["open"]) - bool(token["close"])
            self._is_continued = token[0] == "\\"
        if len(self._quote) == 1 and not line.endswith("\\"):
            self._quote = ""  # It ends with its line, whether it is right or not.
