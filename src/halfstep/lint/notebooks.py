"""Notebooks: their cells as one module, and fixes put back into the file without touching anything else."""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from halfstep.lint.magics import mask_cell, named, prefixed, unmasked
from halfstep.lint.source import AbstractSource, Change, Fault, Place, Rewriting, with_newlines

__all__ = ["Notebook", "read_notebook"]

# Where a message says a line of the text, outside of what it quotes.
_QUOTED: Final = re.compile(r"(`[^`]*`)")
_LINES: Final = re.compile(r"\blines? (\d+(?:(?:, | and )\d+)*)")
_HALVES: Final = re.compile(r"[\ud800-\udfff]")
_BLANK: Final = re.compile(r"[ \t\n\r]*")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A cell of code.

    Attributes:
        number: Its number among all cells, from 1.
        raw: Its code, with its own line endings.
        text: Its code, in which every line ends with a line feed.
        masked: The same without magics; empty lines where it is no Python.
        hidden: Its magics.
        prefixes: What was taken away from the beginning of each line; empty where nothing was.
        start: The line of the notebook's text that stands before it.
    """

    number: int
    raw: str
    text: str
    masked: str
    hidden: Mapping[int, str]
    prefixes: tuple[str, ...]
    start: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook(AbstractSource):
    r"""A notebook, whose cells of code are one module: what an earlier one defines is known in the later ones.

    Attributes:
        path: The file, as users are shown it.
        text: The code of all cells, each below a line with its number.
        faults: The cells that are no Python; they are empty in the text.
        document: The file.
        has_mark: Whether the file begins with a byte-order mark.
        cells: The cells of code.

    Example:
        >>> content = b'{"cells": [{"cell_type": "code", "source": ["%time\\n", "x = 1"]}]}'
        >>> notebook = read_notebook(content, path="train.ipynb")
        >>> print(notebook.text)
        "halfstep cell 1"
        __halfstep_magic_0__
        x = 1
        <BLANKLINE>
        >>> notebook.place(3)
        Place(line=2, cell=1)
        >>> notebook.rewriting(notebook.text.replace("x = 1", "y = 2")).content
        b'{"cells": [{"cell_type": "code", "source": ["%time\\n", "y = 2"]}]}'
    """

    path: str
    text: str
    faults: tuple[Fault, ...]
    document: str
    has_mark: bool
    cells: tuple[_Cell, ...]

    def place(self, line: int) -> Place:
        """The cell of a line, and the line within it."""
        cell = self._cell(line)
        return Place(line=max(line - cell.start, 1), cell=cell.number)

    def indentation(self, line: int) -> int:
        """The length of a prompt, or of the indentation of a cell."""
        cell = self._cell(line)
        place = line - cell.start - 1
        return len(cell.prefixes[place]) if 0 <= place < len(cell.prefixes) else 0

    def shown(self, message: str, *, place: Place) -> str:
        """The message with lines of cells, and with magics as they are in the notebook."""
        parts = _QUOTED.split(message)
        parts[::2] = [_LINES.sub(lambda match: self._lines(match[1], place), part) for part in parts[::2]]
        hidden = {number: magic for cell in self.cells for number, magic in cell.hidden.items()}
        return named("".join(parts), hidden)

    def _lines(self, numbers: str, place: Place) -> str:
        """Lines of the text as lines of their cells: `line 2`, `lines 2 and 5`, `line 2 of cell 1 and lines 3 and 4 of cell 7`."""
        found = [self.place(int(number)) for number in re.findall(r"\d+", numbers)]
        cells = dict.fromkeys(each.cell for each in found)
        texts = []
        for cell in cells:
            lines = [str(each.line) for each in found if each.cell == cell]
            texts.append(f"line{'s' * (len(lines) > 1)} {_listed(lines)}{f' of cell {cell}' * (cell != place.cell)}")
        return _listed(texts)

    def _cell(self, line: int) -> _Cell:
        return self.cells[max(bisect_right(self.cells, line, key=lambda cell: cell.start) - 1, 0)]

    def rewriting(self, text: str) -> Rewriting | None:
        """The notebook with other code; `None` where code left its cell, or a magic is gone."""
        texts = self._texts(text)
        if texts is None:
            return None
        changed = {
            cell.number: (cell, with_newlines(new, like=cell.raw)) for cell, new in zip(self.cells, texts, strict=True) if new != cell.text
        }
        document = _replaced(self.document, {number: new for number, (_, new) in changed.items()})
        original, content = (codecs.BOM_UTF8 * self.has_mark + each.encode() for each in (self.document, document))
        changes = (
            Change(label=f"{self.path}:cell {number}", before=_bytes(cell.raw), after=_bytes(new))
            for number, (cell, new) in changed.items()
        )
        return Rewriting(original=original, content=content, changes=tuple(changes))

    def _texts(self, text: str) -> list[str] | None:
        """What becomes of each cell."""
        lines = text.removesuffix("\n").split("\n")
        marks = {_mark(cell.number): cell for cell in self.cells}
        places = [place for place, line in enumerate(lines) if line in marks]
        if [lines[place] for place in places] != list(marks) or places[:1] not in ([], [0]):
            return None
        texts: list[str] = []
        for cell, first, last in zip(self.cells, places, [*places[1:], len(lines)], strict=False):
            masked = "\n".join(lines[first + 1 : last])
            restored = unmasked(prefixed(masked, cell.prefixes, like=cell.masked), cell.hidden)
            if restored is None or (masked != cell.masked and not cell.masked.strip()):
                return None
            # Where something was taken away, it has to be so again.
            if cell.prefixes and mask_cell(restored, first=min(cell.hidden, default=0)).text != masked:
                return None
            texts.append(cell.text if masked == cell.masked else restored)
        return texts


def read_notebook(content: bytes, *, path: str) -> Notebook:
    """A notebook; without cells where its language is not Python.

    Args:
        content: The bytes of the file.
        path: The file, as users are shown it.

    Raises:
        SyntaxError: It is no notebook; the error has the line.
        RecursionError: It is nested too deeply.
    """
    has_mark = content.startswith(codecs.BOM_UTF8)
    try:
        document = content[len(codecs.BOM_UTF8) * has_mark :].decode()
        plain = json.loads(document)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SyntaxError(f"it is no notebook: it is not in utf-8: {error.reason}", (path, line, 1, "")) from error
    except json.JSONDecodeError as error:
        raise SyntaxError(f"it is no notebook: {error.msg}", (path, error.lineno, error.colno, "")) from error
    if not isinstance(plain, dict) or not isinstance(plain.get("cells"), list):
        raise SyntaxError("it is no notebook of format 4: it has no cells", (path, 1, 1, ""))
    cells, faults = _cells(plain) if _is_python(plain) else ([], [])
    return Notebook(
        path=path,
        text="".join(f"{_mark(cell.number)}\n{cell.masked}\n" for cell in cells),
        faults=tuple(faults),
        document=document,
        has_mark=has_mark,
        cells=tuple(cells),
    )


def _mark(number: int) -> str:
    # A text of its own is a statement, so that no fix moves it with another; in the first line it is the module's docstring.
    return f'"halfstep cell {number}"'


def _is_python(plain: Mapping[str, Any]) -> bool:
    metadata = plain.get("metadata")
    if not isinstance(metadata, dict):
        return True
    abouts = ((metadata.get("kernelspec"), "language"), (metadata.get("language_info"), "name"))
    named = [about.get(key) for about, key in abouts if isinstance(about, dict)]
    return all(language is None or str(language).lower() in {"python", "ipython"} for language in named)


def _cells(plain: Mapping[str, Any]) -> tuple[list[_Cell], list[Fault]]:
    cells: list[_Cell] = []
    faults: list[Fault] = []
    start, magics = 1, 0
    for number, cell in enumerate(plain["cells"], start=1):
        source = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        raw = "".join(source) if isinstance(source, list) and all(isinstance(line, str) for line in source) else source
        if not isinstance(raw, str):
            continue
        text = raw.replace("\r\n", "\n").replace("\r", "\n")
        masked = mask_cell(text, first=magics)
        if masked.error is not None:
            faults.append(Fault.of(masked.error, cell=number, last_line=text.rstrip("\n").count("\n") + 1))
        cells.append(
            _Cell(number=number, raw=raw, text=text, masked=masked.text, hidden=masked.hidden, prefixes=masked.prefixes, start=start)
        )
        start += masked.text.count("\n") + 2
        magics += len(masked.hidden)
    return cells, faults


def _replaced(document: str, sources: Mapping[int, str]) -> str:
    """The JSON with other sources of some cells, and every other character as it was."""
    begin = _skip(document, 0)
    array, _ = dict(_members(document, begin))["cells"]
    cells = dict(enumerate(_items(document, array), start=1))
    # Who wrote nothing beyond ASCII escapes everything.
    escapes = document.isascii()
    for number in sorted(sources, reverse=True):
        first, end = dict(_members(document, cells[number][0]))["source"]
        document = document[:first] + _rendered(document[first:end], sources[number], escapes=escapes) + document[end:]
    return document


def _rendered(old: str, source: str, *, escapes: bool) -> str:
    """A source in the way that the old one was written: as a text, or as a list of lines with the same layout."""
    if old.startswith('"'):
        return _quoted(source, escapes=escapes)
    lines = [line for line in re.split(r"(?<=\n)", source) if line]
    spans = list(_items(old, 0))
    kept = {json.loads(old[first:end]): old[first:end] for first, end in spans}
    written = [kept.get(line) or _quoted(line, escapes=escapes) for line in lines]
    if not spans or not written:
        return f"[{', '.join(written)}]"
    lead, trail = old[1 : spans[0][0]], old[spans[-1][1] : -1]
    between = old[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{lead or ' '}"
    return f"[{lead}{between.join(written)}{trail}]"


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # A cell may hold half of a surrogate pair.


def _quoted(text: str, *, escapes: bool) -> str:
    """A text as JSON. Half of a surrogate pair is escaped in any case: no encoding has it."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(text, ensure_ascii=escapes))


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _members(document: str, place: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The keys of the object that begins here, and where their values are."""
    decoder = json.JSONDecoder()
    place = _skip(document, place + 1)
    while document[place] != "}":
        key, place = decoder.raw_decode(document, place)
        first = _skip(document, _skip(document, place) + 1)
        _, end = decoder.raw_decode(document, first)
        yield key, (first, end)
        place = _skip(document, end)
        if document[place] == ",":
            place = _skip(document, place + 1)


def _items(document: str, place: int) -> Iterator[tuple[int, int]]:
    """Where the items of the list are that begins here."""
    decoder = json.JSONDecoder()
    place = _skip(document, place + 1)
    while document[place] != "]":
        _, end = decoder.raw_decode(document, place)
        yield place, end
        place = _skip(document, end)
        if document[place] == ",":
            place = _skip(document, place + 1)


def _skip(document: str, place: int) -> int:
    """The next character that is not blank."""
    match = _BLANK.match(document, place)
    return place if match is None else match.end()
