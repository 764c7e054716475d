"""Whether it is worth looking for evidence in a file."""

from __future__ import annotations

import re
from typing import Final

from halfstep.lint.module import Module

__all__ = ["may_be_half"]

# What makes values float16 by name; CUDA autocast does so by default.
_HALF: Final = re.compile(r"(?<!b)float16|\bhalf\b|fp16")


def may_be_half(module: Module) -> bool:
    """Whether anything in a file can make values float16.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> may_be_half(parse_module("model(x).masked_fill(mask, -1e9)"))
        False
    """
    return _HALF.search(module.text) is not None or ("autocast" in module.text and "cuda" in module.text)
