"""Floating-point formats, by the names that records have for their dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["FORMATS", "LARGEST"]

# What readers call them, and where each ends.
FORMATS: Final[Mapping[str, str]] = MappingProxyType({"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"})
LARGEST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "float16": (2 - 2.0**-10) * 2.0**15,
        "bfloat16": (2 - 2.0**-7) * 2.0**127,
        "float32": (2 - 2.0**-23) * 2.0**127,
        "float64": (2 - 2.0**-52) * 2.0**1023,
    }
)
