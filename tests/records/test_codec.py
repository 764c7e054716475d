"""Every record, found by itself, and the JSON that it is written as."""

from __future__ import annotations

import copy
import json
import pickle
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields, is_dataclass, replace
from importlib import import_module
from math import copysign, isnan
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import halfstep.records
from halfstep.errors import RecordFormatError
from halfstep.records import AbstractRecord, Device, Interval, StepRecord
from halfstep.records.codec import decode, encode
from tests.strategies import RECORDS, floats


def record_classes() -> list[type[AbstractRecord]]:
    """Every record class that a module of `halfstep.records` defines."""
    for module in pkgutil.walk_packages(halfstep.records.__path__, "halfstep.records."):
        import_module(module.name)

    def below(cls: type[AbstractRecord]) -> Iterator[type[AbstractRecord]]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    # `slots=True` makes a second class; the first one stays a subclass until it is collected.
    alive = {cls for cls in below(AbstractRecord) if getattr(sys.modules[cls.__module__], cls.__name__, None) is cls}
    return sorted(alive, key=lambda cls: cls.__name__)


every_record = pytest.mark.parametrize("cls", record_classes(), ids=lambda cls: cls.__name__)


def same(left: object, right: object) -> bool:
    """Equality of type and value, all the way down; NaN is the same as NaN, and 0.0 is not the same as -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return (isnan(left) and isnan(right)) or (left == right and copysign(1, left) == copysign(1, right))
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, AbstractRecord):
        return all(same(getattr(left, name), getattr(right, name)) for name in field_names(type(left)))
    return left == right


def record_fields(cls: Any) -> tuple[Field[Any], ...]:
    return fields(cls)


def field_names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def strict(text: str) -> Any:
    """What a JSON parser that knows no NaN and no Infinity reads."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


# A sensible value for every annotation, from which the tests of wrong input start.
def plain_example(annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (str, int, float, bool):
        return {str: "text", int: 3, float: 0.5, bool: True}[annotation]
    if origin is Literal:
        return args[0]
    if origin is tuple:
        return [plain_example(args[0])]
    if type(None) in args:
        return plain_example(args[0])
    return plain_record(annotation)


def plain_record(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    plain = {name: plain_example(hints[name]) for name in field_names(cls)}
    return plain | ({"schema": 1} if "schema" in plain else {})


def wrong_examples(annotation: Any) -> list[Any]:
    """Values that a field of this annotation must not take."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ["other", "", 1, True, None, [], {}]
    if origin is tuple:
        return ["abc", {"abc": 1}, 3, True, None, *([item] for item in wrong_examples(args[0]))]
    if type(None) in args:
        return [value for value in wrong_examples(args[0]) if value is not None]
    table: dict[Any, list[Any]] = {
        int: [True, 1.5, 1.0, "1", None, [], {}, [1]],
        float: [True, False, "1.0", "nan", "inf", "", None, [], {}, [1.0], 10**400],
        bool: [0, 1, 1.0, "true", None, [], {}],
        str: [1, 1.5, True, None, [], ["a"], {}],
    }
    if annotation in table:
        return table[annotation]
    return [3, True, "text", None, [], [plain_record(annotation)], {}]


def wrong_fields() -> list[Any]:
    return [
        pytest.param(cls, name, wrong, id=f"{cls.__name__}-{name}-{str(wrong)[:20]}")
        for cls in record_classes()
        for name in field_names(cls)
        for wrong in wrong_examples(get_type_hints(cls)[name])
    ]


def test_the_finder_finds_the_records_that_are_exported() -> None:
    exported = {getattr(halfstep.records, name) for name in halfstep.records.__all__}
    classes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, AbstractRecord)} - {AbstractRecord}
    assert set(record_classes()) == classes
    assert len(classes) >= 8


@every_record
def test_every_record_has_a_strategy(cls: type[AbstractRecord]) -> None:
    assert cls in RECORDS, f"tests/strategies.py has no strategy for {cls.__name__}; add one to RECORDS."


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in record_classes() for name in field_names(cls) if name != "schema"])
def test_every_strategy_varies_every_field(cls: type[AbstractRecord], name: str) -> None:
    seen: list[object] = []

    def differs(record: AbstractRecord) -> bool:
        seen.append(getattr(record, name))
        return not same(seen[0], seen[-1])

    # Raises NoSuchExample for a field that keeps its default because the strategy leaves it out.
    assert find(RECORDS[cls], differs, settings=settings(phases=[Phase.generate], max_examples=50, database=None)) is not None


@every_record
@given(data=st.data())
def test_a_record_survives_json(cls: type[AbstractRecord], data: st.DataObject) -> None:
    record = data.draw(RECORDS[cls])
    text = record.to_json()
    assert same(cls.from_json(text), record)
    assert same(cls.from_json(text.encode()), record)
    assert same(cls.from_json(record.to_json(indent=2)), record)
    assert strict(text) == encode_strictly(record)
    assert "\n" not in text


def encode_strictly(record: AbstractRecord) -> Any:
    return strict(json.dumps(encode(record), allow_nan=False))


@every_record
def test_keys_stand_in_the_order_of_the_fields(cls: type[AbstractRecord]) -> None:
    shuffled = dict(reversed(plain_record(cls).items()))
    assert list(strict(cls.from_json(json.dumps(shuffled)).to_json())) == field_names(cls)


@every_record
def test_a_record_is_frozen_slotted_and_keyword_only(cls: Any) -> None:
    record = cls.from_json(json.dumps(plain_record(cls)))
    assert is_dataclass(cls)
    assert not hasattr(record, "__dict__")
    assert all(field.kw_only for field in fields(cls))
    for name in field_names(cls):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(record, name, getattr(record, name))
        with pytest.raises(FrozenInstanceError, match=name):
            delattr(record, name)


@every_record
def test_a_record_is_hashable_and_is_copied_and_pickled_as_itself(cls: type[AbstractRecord]) -> None:
    record = cls.from_json(json.dumps(plain_record(cls)))
    for twin in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record)), replace(record)):  # type: ignore[type-var]
        assert twin == record
        assert hash(twin) == hash(record)


@every_record
def test_unknown_keys_are_passed_over(cls: type[AbstractRecord]) -> None:
    plain = plain_record(cls)
    assert cls.from_json(json.dumps({"added_later": [1], **plain})) == cls.from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("cls", "name", "default"),
    [(cls, field.name, field.default) for cls in record_classes() for field in record_fields(cls) if has_default(field)],
)
def test_a_field_that_an_older_halfstep_did_not_write_has_its_default(cls: type[AbstractRecord], name: str, default: object) -> None:
    plain = plain_record(cls)
    del plain[name]
    assert same(getattr(cls.from_json(json.dumps(plain)), name), default)


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, field.name) for cls in record_classes() for field in record_fields(cls) if not has_default(field)]
)
def test_a_missing_field_is_named(cls: type[AbstractRecord], name: str) -> None:
    plain = plain_record(cls)
    del plain[name]
    with pytest.raises(RecordFormatError, match=rf"not an? {cls.__name__}: required field missing @ \$\.{name}\.$"):
        cls.from_json(json.dumps(plain))


@pytest.mark.parametrize(("cls", "name", "wrong"), wrong_fields())
def test_a_field_of_another_type_is_named(cls: type[AbstractRecord], name: str, wrong: Any) -> None:
    with pytest.raises(RecordFormatError, match=rf"not an? {cls.__name__}: [^$]* @ \$\.{name}\b"):
        cls.from_json(json.dumps({**plain_record(cls), name: wrong}))


@every_record
@pytest.mark.parametrize("text", ["[]", "3", "null", "true", '"median"', '[["median", 1]]'])
def test_json_that_is_no_object_is_refused(cls: type[AbstractRecord], text: str) -> None:
    with pytest.raises(RecordFormatError, match=r"an object was expected, not .* @ \$\."):
        cls.from_json(text)


@every_record
@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[1,]", "{} {}", b"\xff\xfe\xfd", "[" * 100_000, '{"a": "\n"}'])
def test_text_that_is_no_json_is_refused(cls: type[AbstractRecord], text: str | bytes) -> None:
    with pytest.raises(RecordFormatError, match=rf"^This is not an? {cls.__name__}: it is no valid JSON \(.+\)\.$"):
        cls.from_json(text)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_without_quotes_is_no_json(constant: str) -> None:
    text = f'{{"median": {constant}, "low": 1, "high": 2}}'
    with pytest.raises(RecordFormatError, match=f"no valid JSON \\({constant} stands without quotes"):
        Interval.from_json(text)


def test_an_error_shows_what_stood_there_and_what_was_expected() -> None:
    wrong = json.dumps({"median": "fast", "low": None, "high": 2})
    with pytest.raises(RecordFormatError) as caught:
        Interval.from_json(wrong)
    assert str(caught.value) == (
        "This JSON is not an Interval: a number was expected, not 'fast' @ $.median; a number was expected, not None @ $.low."
    )


def test_an_error_names_the_place_in_nested_lists() -> None:
    with pytest.raises(RecordFormatError, match=re.escape("text was expected, not 1 @ $.native[1].")):
        Device.from_json(json.dumps({**plain_record(Device), "native": ["fp32", 1]}))


def test_a_long_wrong_value_is_shortened() -> None:
    with pytest.raises(RecordFormatError) as caught:
        Interval.from_json(json.dumps({"median": "x" * 10_000, "low": 1, "high": 1}))
    assert len(str(caught.value)) < 200


@given(number=floats())
def test_a_non_finite_number_is_written_as_a_word(number: float) -> None:
    written = strict(Interval(median=number, low=0.0, high=0.0).to_json())["median"]
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    assert same(written, words.get(repr(number), number))


@given(number=st.integers(-(2**53), 2**53))
def test_a_whole_number_is_read_as_a_float_where_a_float_is_due(number: int) -> None:
    assert same(Interval.from_json(f'{{"median": {number}, "low": 0, "high": 0}}').median, float(number))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, int])
def test_numbers_of_other_types_are_written_as_floats(kind: type) -> None:
    record = Interval(median=kind(2), low=kind(1), high=kind(3))
    assert record.to_json() == '{"median": 2.0, "low": 1.0, "high": 3.0}'


def test_numpy_scalars_are_written_as_plain_numbers() -> None:
    numpy: Any = {"step": np.int64(3), "skipped": np.bool_(True), "grad_norm": np.float32(0.5), "memory_bytes": np.int32(7)}
    record = StepRecord(scale=1.0, loss=0.5, lr=0.1, step_time_s=0.1, precision="fp32", **numpy)
    assert StepRecord.from_json(record.to_json()) == replace(record, step=3, skipped=True, grad_norm=0.5, memory_bytes=7)


def test_a_fraction_is_not_written_into_a_whole_number() -> None:
    wrong: Any = 1.5
    record = StepRecord(
        step=wrong, skipped=False, scale=1.0, loss=0.5, grad_norm=None, lr=0.1, step_time_s=0.1, memory_bytes=None, precision="fp32"
    )
    with pytest.raises(TypeError, match="integer"):
        record.to_json()


@pytest.mark.parametrize("name", ["Prozessor für 半精度 </script>", "line\u2028separator", "half a pair \udc80"])
def test_any_text_is_written_in_ascii_and_read_back(name: str) -> None:
    """A name from a file system may hold half a surrogate pair, which no UTF-8 file can; and some readers break lines at U+2028."""
    device = Device.from_json(json.dumps({**plain_record(Device), "name": name}))
    assert device.to_json().isascii()
    assert Device.from_json(device.to_json()).name == name


def test_decode_reads_a_class_that_is_no_abstract_record() -> None:
    assert decode('{"name": "a"}', _Plain) == _Plain(name="a")


@dataclass(frozen=True)
class _Plain:
    name: str


def test_the_helpers_of_this_file_tell_what_they_should() -> None:
    assert not same(0.0, -0.0)
    assert same(float("nan"), -float("nan"))
    assert not same(1, True)
    assert not same((1.0,), (1.0, 2.0))
    assert plain_example(Union[float, None]) == 0.5  # noqa: UP007 - the spelling that the other branch does not see
    with pytest.raises(ValueError, match="NaN is no JSON"):
        strict("[NaN]")
