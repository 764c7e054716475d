"""Records to JSON and back, derived from their dataclass fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from operator import index
from reprlib import repr as short
from types import GenericAlias
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from cattrs import BaseValidationError, Converter, transform_error

from halfstep.errors import RecordFormatError

__all__ = ["decode", "encode", "parse", "structure"]

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
        raise TypeError(f"a number was expected, not {short(value)}")
    return float(value)


def _int_from_json(value: Any, _: type) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a whole number was expected, not {short(value)}")
    return value


def _bool_from_json(value: Any, _: type) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false was expected, not {short(value)}")
    return value


def _str_from_json(value: Any, _: type) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text was expected, not {short(value)}")
    return value


def _literal_from_json(value: Any, kind: Any) -> Any:
    allowed = get_args(kind)
    if value not in allowed:
        raise TypeError(f"{' or '.join(map(repr, allowed))} was expected, not {short(value)}")
    return value


def _is_literal(kind: Any) -> bool:
    origin: object = get_origin(kind)
    return origin is Literal


def _is_tuple(kind: Any) -> bool:
    origin: object = get_origin(kind)
    return origin is tuple


def _tuple_hook(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    many: Any = GenericAlias(list, get_args(kind)[:1])

    # Without this check the letters of a text and the keys of an object would be taken for items.
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError(f"a list was expected, not {short(value)}")
        return tuple(converter.structure(value, many))

    return hook


def _record_hook(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    fill = converter.gen_structure_attrs_fromdict(kind)

    # Without this check every field of a record that is a number or a list would be reported.
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"an object was expected, not {short(value)}")
        return fill(value, kind)

    return hook


def _converter() -> Converter:
    converter = Converter()
    converter.register_unstructure_hook(float, _float_to_json)
    # NumPy's whole numbers and truth values are no `int` and no `bool`, and `json` writes neither.
    converter.register_unstructure_hook(int, index)
    converter.register_unstructure_hook(bool, bool)
    converter.register_structure_hook(float, _float_from_json)
    converter.register_structure_hook(int, _int_from_json)
    converter.register_structure_hook(bool, _bool_from_json)
    converter.register_structure_hook(str, _str_from_json)
    converter.register_structure_hook_func(_is_literal, _literal_from_json)
    converter.register_structure_hook_factory(_is_tuple, lambda kind: _tuple_hook(kind, converter))
    converter.register_structure_hook_factory(is_dataclass, lambda kind: _record_hook(kind, converter))
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
    return structure(parse(text, cls), cls)


def parse(text: str | bytes, cls: type) -> Any:
    """The plain dictionaries, lists, numbers and strings in a JSON text that should hold a record.

    Args:
        text: The JSON.
        cls: The record's class, for the message.

    Raises:
        RecordFormatError: The text is not JSON; a bare `NaN` or `Infinity` is not.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordFormatError(f"This is not {_named(cls)}: it is no valid JSON ({error}).") from error


def structure(plain: Any, cls: type[T]) -> T:
    """The record that plain dictionaries, lists, numbers and strings stand for.

    Raises:
        RecordFormatError: A field is missing, or has another type; the message names every such field.
    """
    try:
        return _CONVERTER.structure(plain, cls)
    except (BaseValidationError, TypeError) as error:
        faults = "; ".join(transform_error(error, format_exception=_fault))
        raise RecordFormatError(f"This JSON is not {_named(cls)}: {faults}.") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} stands without quotes")


def _fault(error: BaseException, _: type | None) -> str:
    return "required field missing" if isinstance(error, KeyError) else str(error)


def _named(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"
