"""Source code as it lies in a file: its text for the rules, and all that must stay as it is when the text is changed."""

from __future__ import annotations

import errno
import io
import sys
import tokenize
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import final

from halfstep.lint.lines import LINE_END

__all__ = ["AbstractSource", "Change", "Fault", "Place", "Rewriting", "Script", "read_content", "read_script", "with_newlines"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a line of the checked text is in its file.

    Attributes:
        line: The line, from 1; in a notebook, within the cell.
        cell: The number of the cell among all cells, from 1; `None` outside notebooks.
    """

    line: int
    cell: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A place where text is no Python.

    Attributes:
        place: Where.
        column: The column, from 1.
        reason: What Python says about it.
    """

    place: Place
    column: int
    reason: str

    @staticmethod
    def of(error: Exception, *, cell: int | None = None, last_line: int | None = None) -> Fault:
        """What an error of the parser says.

        Args:
            error: The error.
            cell: The cell that was parsed.
            last_line: The last line of what was parsed: the parser may name the one behind it.
        """
        line = (error.lineno if isinstance(error, SyntaxError) else None) or 1
        column = (error.offset if isinstance(error, SyntaxError) else None) or 1
        if last_line is not None and line > last_line:
            line, column = max(last_line, 1), 1
        return Fault(place=Place(line=line, cell=cell), column=max(column, 1), reason=_reason(error))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a fix changes, to be shown as a difference.

    Attributes:
        label: The file, and in a notebook the cell.
        before: All bytes of it before.
        after: All bytes after.
    """

    label: str
    before: bytes
    after: bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """A file with changed text.

    Attributes:
        original: All bytes of the file before.
        content: All bytes of the changed file.
        changes: What is different.
    """

    original: bytes
    content: bytes
    changes: tuple[Change, ...]


class AbstractSource(ABC):
    r"""Source code that is checked as one module.

    Attributes:
        path: The file, as users are shown it.
        text: The text, in which every line ends with `\n`.
        faults: Where parts of it that were left out of the text are no Python.
    """

    __slots__ = ()

    path: str
    text: str
    faults: tuple[Fault, ...]

    @abstractmethod
    def place(self, line: int) -> Place:
        """Where a line of the text is in the file."""

    @abstractmethod
    def indentation(self, line: int) -> int:
        """How many characters at the beginning of a line are in the file and not in the text."""

    @abstractmethod
    def shown(self, message: str, *, place: Place) -> str:
        """A message about a place, in which lines of the text, such as `line 7`, become lines that users see."""

    @abstractmethod
    def rewriting(self, text: str) -> Rewriting | None:
        """The file with another text in place of this one; `None` where that text cannot be put back into the file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Script(AbstractSource):
    r"""A file of Python.

    Attributes:
        path: The file, as users are shown it.
        text: The text, in which every line ends with `\n`.
        raw: The text with the line endings of the file.
        encoding: How it is written: by its first lines, or UTF-8; with a byte-order mark `utf-8-sig`.
        is_exact: Whether writing the text in this encoding gives back the bytes of the file.
        faults: None: a file of Python is checked whole.

    Example:
        >>> script = read_script(b"x = 1\r\ny = 2\r\n", path="train.py")
        >>> script.text
        'x = 1\ny = 2\n'
        >>> script.rewriting("x = 1\n").content
        b'x = 1\r\n'
    """

    path: str
    text: str
    raw: str
    encoding: str
    is_exact: bool
    faults: tuple[Fault, ...] = ()

    def place(self, line: int) -> Place:
        """The line itself."""
        return Place(line=line)

    def indentation(self, line: int) -> int:
        """None: lines are whole."""
        return 0

    def shown(self, message: str, *, place: Place) -> str:
        """The message itself."""
        return message

    def rewriting(self, text: str) -> Rewriting | None:
        """The file with another text, in its encoding and with its line endings."""
        if not self.is_exact:
            return None
        original, content = (_encoded(each, self.encoding) for each in (self.raw, with_newlines(text, like=self.raw)))
        if original is None or content is None:
            return None
        return Rewriting(original=original, content=content, changes=(Change(label=self.path, before=original, after=content),))


def read_content(path: Path | None) -> bytes:
    """The bytes of a file, or of standard input for `None`.

    Raises:
        OSError: They cannot be read, or standard input is closed.
    """
    if path is not None:
        return path.read_bytes()
    if sys.stdin is None:  # So it is in a process that was started without one.
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer.read()


def read_script(content: bytes, *, path: str) -> Script:
    """A file of Python, decoded as Python does it.

    Args:
        content: The bytes of the file.
        path: The file, as users are shown it.

    Raises:
        SyntaxError: It is in no encoding that Python can read; the error has the line.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    try:
        raw = content.decode(encoding)
    except UnicodeDecodeError as error:
        # Positions do not count a byte-order mark, which is on the first line anyway.
        line = len(LINE_END.findall(content[: error.start].decode("latin-1"))) + 1
        raise SyntaxError(f"it is not in {encoding}: {error.reason}", (path, line, 1, None)) from error
    except (LookupError, ValueError) as error:  # An encoding such as `hex`, which is none of text.
        raise SyntaxError(f"it cannot be decoded from {encoding}: {error}", (path, 1, 1, None)) from error
    return Script(
        path=path,
        text=LINE_END.sub("\n", raw) if "\r" in raw else raw,
        raw=raw,
        encoding=encoding,
        is_exact=_encoded(raw, encoding) == content,
    )


def with_newlines(text: str, *, like: str) -> str:
    r"""A text with the line endings of an older version of it.

    Args:
        text: The text, in which every line ends with `\n`.
        like: The older version. Where its lines end differently, they go on to do so, and new ones end as most do.

    Example:
        >>> with_newlines("a\nb\nc\n", like="a\nc\r\nd\r\n")
        'a\nb\r\nc\r\n'
    """
    counts = Counter(LINE_END.findall(like))
    if set(counts) <= {"\n"}:
        return text
    usual = counts.most_common(1)[0][0]
    return text.replace("\n", usual) if len(counts) == 1 else "".join(_mixed(text, like, usual))


def _mixed(text: str, like: str, usual: str) -> Iterator[str]:
    endings = [*LINE_END.findall(like), ""]
    old, new = LINE_END.split(like), text.split("\n")
    shortest = min(len(old), len(new))
    head = next((place for place in range(shortest) if old[place] != new[place]), shortest)
    tail = next((place for place in range(shortest - head) if old[-1 - place] != new[-1 - place]), shortest - head)
    # A line that takes the place of another ends as that one did. Lines that are all alike, such as empty ones, are compared only beside
    # others, or it would take minutes.
    kept = dict(enumerate(endings[:head])) | {len(new) - 1 - place: endings[len(old) - 1 - place] for place in range(tail)}
    middle = SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail])
    kept |= {
        head + new_first + place: endings[head + old_first + place]
        for _, old_first, old_last, new_first, new_last in middle.get_opcodes()
        for place in range(min(old_last - old_first, new_last - new_first))
    }
    for place, line in enumerate(new):
        yield line
        if place < len(new) - 1:
            yield kept.get(place) or usual


def _encoded(text: str, encoding: str) -> bytes | None:
    try:
        return text.encode(encoding)
    except UnicodeError:  # Not always UnicodeEncodeError: `idna` raises the bare one.
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return error.msg or "invalid syntax"
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "it holds half of a surrogate pair, which is no character"
    return str(error) or type(error).__name__
