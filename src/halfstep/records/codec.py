"""Records to JSON and back, derived from their dataclass fields."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from cattrs import BaseValidationError, Converter, transform_error

from halfstep.errors import RecordFormatError

__all__ = ["decode", "encode"]

T = TypeVar("T")

# JSON has no NaN and no infinities; these three strings are what Protocol Buffers' JSON mapping writes for them.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _float_to_json(value: Any) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _float_from_json(value: Any, _: type) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number was expected, not {value!r}")
    return float(value)


def _int_from_json(value: Any, _: type) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a whole number was expected, not {value!r}")
    return value


def _bool_from_json(value: Any, _: type) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false was expected, not {value!r}")
    return value


def _str_from_json(value: Any, _: type) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text was expected, not {value!r}")
    return value


def _converter() -> Converter:
    converter = Converter()
    converter.register_unstructure_hook(float, _float_to_json)
    converter.register_structure_hook(float, _float_from_json)
    converter.register_structure_hook(int, _int_from_json)
    converter.register_structure_hook(bool, _bool_from_json)
    converter.register_structure_hook(str, _str_from_json)
    return converter


_CONVERTER = _converter()


def encode(record: Any) -> dict[str, Any]:
    """The plain dictionaries, lists, numbers and strings that a record is written as.

    Args:
        record: A dataclass instance whose fields are JSON-like values or such instances.

    Returns:
        What `json.dumps(..., allow_nan=False)` accepts; non-finite floats became `"NaN"`, `"Infinity"` or `"-Infinity"`.
    """
    plain: dict[str, Any] = _CONVERTER.unstructure(record)
    return plain


def decode(text: str | bytes, cls: type[T]) -> T:
    """The record that a JSON text holds.

    Args:
        text: JSON, as `encode` and `json.dumps` write it. Keys that the record does not have are passed over.
        cls: The record's class.

    Raises:
        RecordFormatError: The text is not JSON, or lacks a field, or has a field of another type.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise RecordFormatError(f"This is not a {cls.__name__}: it is no valid JSON ({error}).") from error
    try:
        return _CONVERTER.structure(plain, cls)
    except BaseValidationError as error:
        faults = "; ".join(transform_error(error))
        raise RecordFormatError(f"This JSON is not a {cls.__name__}: {faults}.") from error
    except (TypeError, ValueError, KeyError) as error:
        raise RecordFormatError(f"This JSON is not a {cls.__name__}: {error}.") from error
