"""The steps of a run, field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Literal, final, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from halfstep.errors import RecordFormatError
from halfstep.records import StepRecord
from halfstep.records.codec import structure

__all__ = ["ColumnBuilder", "StepColumns"]

_CHUNK: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """What a column of a field of the record of a step holds.

    Attributes:
        name: The field.
        plain: The type of its values.
        optional: Whether they may be `None`.
        dtype: Of the array; that of codes for texts.
        missing: What stands there for `None`.
        allowed: The texts that it may hold; empty where it may hold any.
    """

    name: str
    plain: type
    optional: bool
    dtype: Any
    missing: float
    allowed: frozenset[str]


_DTYPES: Final[Mapping[type, tuple[Any, float]]] = MappingProxyType(
    {int: (np.int64, -1), float: (np.float64, np.nan), bool: (np.bool_, False), str: (np.int32, -1)}
)


def _field(name: str, hint: Any) -> _Field:
    optional = type(None) in get_args(hint)
    plain = next(arg for arg in get_args(hint) if arg is not type(None)) if optional else hint
    allowed = frozenset(get_args(plain)) if get_origin(plain) is Literal else frozenset()
    plain = str if allowed else plain
    dtype, missing = _DTYPES[plain]
    return _Field(name=name, plain=plain, optional=optional, dtype=dtype, missing=missing, allowed=allowed)


_FIELDS: Final = tuple(_field(field.name, get_type_hints(StepRecord)[field.name]) for field in fields(StepRecord))
_DEFAULTS: Final = {field.name: field.default for field in fields(StepRecord) if field.default is not MISSING}
_row_of: Final[Callable[[Mapping[str, Any]], tuple[Any, ...]]] = itemgetter(*(field.name for field in _FIELDS))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """The steps of a run, field by field: `columns.loss` is an array of all losses, and so for each field of `StepRecord`.

    Whole numbers are int64, others float64. Where a number is not known, they hold -1 and NaN; `known` tells a NaN that was recorded
    from one that stands for nothing. Texts, such as the precision, are codes, to be looked up in `names`; -1 stands for none.

    Attributes:
        arrays: The array of each field, by its name.
        names: The texts of each field that holds texts, in the order of their codes.
        known: Of each field that may be `None`: where it is not.

    Example:
        >>> record = StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
        ...     precision="bf16")
        >>> builder = ColumnBuilder()
        >>> builder.add(1, {"step": 1, "skipped": False, "scale": 1.0, "loss": 0.25, "grad_norm": None, "lr": 0.1, "step_time_s": 0.01,
        ...     "memory_bytes": None, "precision": "bf16"})
        >>> columns = builder.columns()
        >>> columns.loss, columns.memory_bytes, columns.names["precision"][columns.precision[0]]
        (array([0.25]), array([-1]), 'bf16')
        >>> list(columns.records()) == [record]
        True
    """

    arrays: Mapping[str, NDArray[Any]]
    names: Mapping[str, tuple[str, ...]]
    known: Mapping[str, NDArray[np.bool_]]

    def __len__(self) -> int:
        return len(self.arrays[_FIELDS[0].name])

    def __getattr__(self, name: str) -> NDArray[Any]:
        # Only names that are no attribute come here. The slots themselves are empty while an object is copied.
        if name not in StepRecord.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.arrays[name]

    def records(self, first: int = 0, last: int | None = None) -> Iterator[StepRecord]:
        """The records of some steps, made one by one.

        Args:
            first: The index of the first one.
            last: The index after the last one; `None` for all.
        """
        names = [field.name for field in _FIELDS]
        first, last, _ = slice(first, last).indices(len(self))
        for start in range(first, last, _CHUNK):
            rows = slice(start, min(start + _CHUNK, last))
            for values in zip(*(self._values(field, rows) for field in _FIELDS), strict=True):
                yield StepRecord(**dict(zip(names, values, strict=True)))

    def _values(self, field: _Field, rows: slice) -> list[Any]:
        values: list[Any] = self.arrays[field.name][rows].tolist()
        if field.plain is str:
            texts = (*self.names[field.name], None)  # The last one is at -1.
            return [texts[code] for code in values]
        if field.optional and not (known := self.known[field.name][rows]).all():
            return [value if there else None for value, there in zip(values, known.tolist(), strict=True)]
        return values


@final
class ColumnBuilder:
    """Puts the steps of a file into columns, many at a time.

    Attributes:
        faults: Of each line that is no step after all, the number, and why.

    Example:
        >>> builder = ColumnBuilder()
        >>> builder.add(3, {"step": "first"})
        >>> len(builder), builder.faults[0][0]
        (0, 3)
    """

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []
        self._lines: list[int] = []
        self._rows: list[tuple[Any, ...]] = []
        self._length = 0
        self._codes: dict[str, dict[str | None, int]] = {field.name: {} for field in _FIELDS if field.plain is str}
        self._parts: dict[str, list[NDArray[Any]]] = {field.name: [] for field in _FIELDS}
        self._known: dict[str, list[NDArray[np.bool_]]] = {field.name: [] for field in _FIELDS if field.optional}

    def add(self, line: int, plain: Mapping[str, Any]) -> None:
        """Takes a step.

        Args:
            line: The number of its line.
            plain: What stands there. What no field is called by is passed over.
        """
        try:
            row = _row_of(plain)
        except KeyError:
            try:
                row = _row_of({**_DEFAULTS, **plain})
            except KeyError:
                self._refuse(line, plain)
                return
        self._lines.append(line)
        self._rows.append(row)
        if len(self._rows) == _CHUNK:
            self._flush()

    def __len__(self) -> int:
        self._flush()
        return self._length

    def columns(self) -> StepColumns:
        """All steps so far."""
        self._flush()
        return StepColumns(
            arrays={field.name: _joined(self._parts[field.name], field.dtype) for field in _FIELDS},
            names={name: tuple(text for text in codes if text is not None) for name, codes in self._codes.items()},
            known={name: _joined(parts, np.bool_) for name, parts in self._known.items()},
        )

    def _flush(self) -> None:
        lines, rows = self._lines, self._rows
        if not rows:
            return
        self._lines, self._rows = [], []
        try:
            self._keep(rows)
        except _FAULTS:
            for line, row in zip(lines, rows, strict=True):
                try:
                    self._keep([row])
                except _FAULTS:
                    self._refuse(line, {field.name: value for field, value in zip(_FIELDS, row, strict=True)})

    def _refuse(self, line: int, plain: Mapping[str, Any]) -> None:
        try:
            structure(plain, StepRecord)
        except RecordFormatError as error:
            self.faults.append((line, str(error)))
        else:
            self.faults.append((line, "A whole number in it is too large."))

    def _keep(self, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = [*zip(*rows, strict=True)]
        arrays = [self._array(field, values) for field, values in zip(_FIELDS, columns, strict=True)]
        for field, values, array in zip(_FIELDS, columns, arrays, strict=True):
            self._parts[field.name].append(array)
            if field.optional:
                self._known[field.name].append(np.array([value is not None for value in values]))
        self._length += len(rows)

    def _array(self, field: _Field, values: tuple[Any, ...]) -> NDArray[Any]:
        if field.plain is str:
            return self._coded(field, values)
        if {*map(type, values)} != {field.plain}:
            values = tuple(value if type(value) is field.plain else _number(field, value) for value in values)
        return np.array(values, dtype=field.dtype)

    def _coded(self, field: _Field, values: tuple[Any, ...]) -> NDArray[Any]:
        codes = self._codes[field.name]
        for text in dict.fromkeys(values):
            if text in codes:
                continue
            if text is None and field.optional:
                codes[text] = -1
            elif isinstance(text, str) and (text in field.allowed or not field.allowed):
                codes[text] = sum(code >= 0 for code in codes.values())
            else:
                raise TypeError(f"no text that {field.name} may hold")
        return np.array([codes[text] for text in values], dtype=field.dtype)


# An error of a record is a ValueError.
_FAULTS: Final = (TypeError, ValueError, OverflowError)


def _number(field: _Field, value: Any) -> Any:
    return field.missing if field.optional and value is None else structure(value, field.plain)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
