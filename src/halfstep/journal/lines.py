"""What a run leaves behind, as lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args, get_type_hints

from halfstep.records import Action, Alert, RunRecord, StepRecord
from halfstep.records.codec import encode

__all__ = ["KINDS", "Entry", "encode_line"]

Entry: TypeAlias = RunRecord | StepRecord | Alert | Action

# What a line says first.
KINDS: Final[Mapping[str, type[Entry]]] = MappingProxyType({"run": RunRecord, "step": StepRecord, "alert": Alert, "action": Action})

_NAMES: Final[Mapping[type, str]] = MappingProxyType({cls: kind for kind, cls in KINDS.items()})


def encode_line(entry: Entry) -> str:
    r"""The line that an entry is written as: one JSON object, `kind` first, and then the fields of the record.

    Args:
        entry: The record.

    Returns:
        ASCII that ends with a newline.

    Example:
        >>> encode_line(Action(rule="persistent_skips", step=40, action="warn", message="A warning was shown."))
        '{"kind": "action", "rule": "persistent_skips", "step": 40, "action": "warn", "message": "A warning was shown."}\n'
    """
    if type(entry) is not StepRecord:
        return _plain_line(entry)
    numbers = _numbers_of(entry)
    form, letters = _FORMS.get((_rest_of(entry), *map(type, numbers))) or _learn(entry)
    line = form % numbers
    # An n too many stands in `nan` or `inf`, which are no JSON.
    return line if line.count("n") == letters else _plain_line(entry)


def _plain_line(entry: Entry) -> str:
    return f'{{"kind": "{_NAMES[type(entry)]}", {entry.to_json()[1:]}\n'


# A training loop writes a line for each step, and the lines of a run differ in little but their numbers. So all that stands around the
# numbers is kept, for each mixture of names and of types of numbers that was met, and how often an n stands there.
_FORMS: dict[tuple[Any, ...], tuple[str, int]] = {}
_MANY: Final = 256
_PRINTED: Final[Mapping[type, str]] = MappingProxyType({int: "%d", float: "%r", type(None): "null%.0s"})


def _is_number(name: str) -> bool:
    hint = get_type_hints(StepRecord)[name]
    return bool({hint, *get_args(hint)} & {int, float})


_NUMBERS: Final = tuple(field.name for field in fields(StepRecord) if _is_number(field.name))
_numbers_of = attrgetter(*_NUMBERS)
_rest_of = attrgetter(*(field.name for field in fields(StepRecord) if field.name not in _NUMBERS))


def _learn(record: StepRecord) -> tuple[str, int]:
    """The form of the line of a record, for the operator `%` and the tuple of its numbers, and how often an n stands in the line."""
    types = tuple(map(type, _numbers_of(record)))
    if not _PRINTED.keys() >= set(types):  # Such as NumPy's, which do not print as JSON does.
        return "%.0s" * len(types), -1
    places = {name: _PRINTED[kind] for name, kind in zip(_NUMBERS, types, strict=True)}
    parts = (f'"{name}": {places.get(name) or json.dumps(value).replace("%", "%%")}' for name, value in encode(record).items())
    form = f'{{"kind": "step", {", ".join(parts)}}}\n'
    letters = (form % ((0,) * len(types))).count("n")
    if len(_FORMS) < _MANY:
        _FORMS[(_rest_of(record), *types)] = form, letters
    return form, letters
