"""Whether it is worth looking for evidence in a file."""

from __future__ import annotations

import re
from typing import Final

from halfstep.lint.module import Module

__all__ = ["may_be_half"]

# What makes values float16 by name; CUDA autocast does so by default.
_HALF: Final = re.compile(r"\bhalf\b")


def may_be_half(module: Module) -> bool:
    """Whether anything in a file can make values float16.

    Example:
        >>> from halfstep.lint.module import parse_module
        >>> may_be_half(parse_module("model(x).masked_fill(mask, -1e9)"))
        False
    """
    text = module.text
    # Plain searches first: they are twenty times as fast.
    if text.count("float16") > text.count("bfloat16") or "fp16" in text or ("autocast" in text and "cuda" in text):
        return True
    return "half" in text and _HALF.search(text) is not None
