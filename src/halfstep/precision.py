"""Which precision a computation runs in."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType
from typing import Final, cast, get_args

import torch

from halfstep.errors import ConfigurationError, InvalidTypeError, did_you_mean
from halfstep.records import Precision

__all__ = ["DTYPES", "HALVES", "PRECISIONS", "parse_precision", "rehearsed_dtype"]

PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)

DTYPES: Final = MappingProxyType[Precision, torch.dtype]({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})

# The dtypes of half the size of fp32.
HALVES: Final = frozenset({torch.float16, torch.bfloat16})


def parse_precision(text: str, *, besides: tuple[str, ...] = ()) -> Precision:
    """The precision that a name stands for.

    Args:
        text: `fp32`, `bf16` or `fp16`.
        besides: Other names that the caller accepts and has dealt with, for the message of an error.

    Raises:
        InvalidTypeError: `text` is no string.
        ConfigurationError: `text` is another string.

    Example:
        >>> parse_precision("bf16")
        'bf16'
        >>> parse_precision("float16")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: Unknown precision 'float16'. Allowed are fp32, bf16 and fp16.
    """
    if not isinstance(cast("object", text), str):
        raise InvalidTypeError(f"A precision is named by a string, one of {_listed(besides)}, not {text!r}.")
    for precision in PRECISIONS:
        if text == precision:
            return precision
    known = (*besides, *PRECISIONS)
    raise ConfigurationError(f"Unknown precision {text!r}. Allowed are {_listed(besides)}.{did_you_mean(text, known=known)}")


def _listed(besides: tuple[str, ...]) -> str:
    names = (*besides, *PRECISIONS)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def rehearsed_dtype(precisions: Collection[str]) -> torch.dtype:
    """The dtype of autocast regions that name none, where these precisions are used: fp16, unless bf16 is the only one of the two.

    Example:
        >>> rehearsed_dtype(["bf16", "fp32"]), rehearsed_dtype(["fp32"])
        (torch.bfloat16, torch.float16)
    """
    return DTYPES["bf16" if "bf16" in precisions and "fp16" not in precisions else "fp16"]
