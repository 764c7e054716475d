"""What notebooks have beyond Python: magics, shell commands and help, masked so that the rest of a cell parses."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

__all__ = ["MaskedCell", "mask_cell", "unmasked"]

# Cell magics below which there is Python that runs in the notebook. Below any other there is another language, or text.
_PYTHON_CELLS: Final = frozenset({"capture", "prun", "time", "timeit"})
_MASK: Final = "__halfstep_magic_{}__"
_MASKED: Final = re.compile(r"(?:# )?__halfstep_magic_(\d+)__")
_LINE_MAGIC: Final = re.compile(r"\s*(?:%|!|\?{1,2}(?=\s*[\w%]))|\s*[%\w.*\[\]'\"]+\?{1,2}\s*(?:#.*)?$")
_ASSIGNED_MAGIC: Final = re.compile(r"(?P<target>\s*[\w.,*\[\]'\" ]+?\s*=\s*)(?P<magic>[%!](?!=).*)$")
# What IPython runs without a mark: such a line is no Python, or the cell would parse.
_SHELL: Final = re.compile(r"(?:pip3?|conda|mamba|uv|apt|apt-get|git|wget|cd|ls|mkdir|rm|cp|mv|cat)\s+[\w./~$-]")
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
        error: What the parser says of a cell that is neither Python nor a magic.
    """

    text: str
    hidden: Mapping[int, str]
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
        return MaskedCell(text=text, hidden=MappingProxyType({}))
    lines = text.split("\n")
    magic = re.match(r"\s*%%(\w*)", text)
    if magic is not None and magic[1] not in _PYTHON_CELLS:
        return MaskedCell(text="\n" * (len(lines) - 1), hidden=MappingProxyType({}))
    hidden: dict[int, str] = {}
    masked = "\n".join(_masked(lines, hidden, first))
    error = _error(masked)
    if error is not None:
        return MaskedCell(text="\n" * (len(lines) - 1), hidden=MappingProxyType({}), error=error)
    return MaskedCell(text=masked, hidden=MappingProxyType(hidden))


def unmasked(text: str, hidden: Mapping[int, str]) -> str | None:
    """The text with its magics back in place; `None` where one is gone, is there twice or is another cell's."""
    if sorted(int(number) for number in _MASKED.findall(text)) != sorted(hidden):
        return None
    return _MASKED.sub(lambda match: hidden[int(match[1])], text)


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
    assigned = _ASSIGNED_MAGIC.match(line)
    return None if assigned is None else assigned.start("magic")


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
