"""Lines as Python counts them."""

from __future__ import annotations

import re

__all__ = ["LINE_END", "lines_of"]

# The characters that end a line for Python; `str.splitlines` knows many more.
LINE_END = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")


def lines_of(text: str) -> list[str]:
    r"""The lines of a text with their ends.

    Example:
        >>> lines_of("a\f\r\nb")
        ['a\x0c\r\n', 'b']
    """
    return _LINE.findall(text)
