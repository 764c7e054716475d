"""A record whose values are read from a device when somebody asks."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from typing import Any

import pytest

from halfstep.records import StepRecord

KNOWN: dict[str, Any] = {
    "step": 7,
    "skipped": True,
    "scale": 65536.0,
    "lr": 0.01,
    "step_time_s": 0.25,
    "memory_bytes": 1024,
    "precision": "fp16",
}
READ: dict[str, Any] = {"loss": 0.5, "grad_norm": 2.0}
# The fields with a default, each with another value.
MORE: dict[str, Any] = {"epoch": 3, "optimizer": "discriminator", "scaler": "used"}
PLAIN = StepRecord(**KNOWN, **READ)


class Reader:
    """A function that counts how often it is called."""

    def __init__(self, values: Mapping[str, Any] = READ) -> None:
        self.values = values
        self.calls = 0

    def __call__(self) -> Mapping[str, Any]:
        self.calls += 1
        return self.values


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_field_is_at_hand(reader: Reader, name: str) -> None:
    record = StepRecord.deferred(reader, **KNOWN)
    assert getattr(record, name) == KNOWN[name]
    assert reader.calls == 0


@pytest.mark.parametrize("name", READ)
def test_a_missing_field_is_read_once(reader: Reader, name: str) -> None:
    record = StepRecord.deferred(reader, **KNOWN)
    assert [getattr(record, name), getattr(record, name)] == [READ[name]] * 2
    assert [record.loss, record.grad_norm] == list(READ.values())
    assert reader.calls == 1


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda record: pickle.loads(pickle.dumps(record)), id="pickle"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(replace, id="replace"),
        pytest.param(lambda record: StepRecord.from_json(record.to_json()), id="json"),
        pytest.param(lambda record: record, id="itself"),
    ],
)
def test_a_deferred_record_is_a_record_like_any_other(reader: Reader, use: Callable[[StepRecord], StepRecord]) -> None:
    twin = use(StepRecord.deferred(reader, **KNOWN))
    assert twin == PLAIN
    assert repr(twin) == repr(PLAIN)
    assert hash(twin) == hash(PLAIN)
    assert twin.to_json() == PLAIN.to_json()
    assert reader.calls == 1


def test_equality_reads_both_sides(reader: Reader) -> None:
    other = Reader({**READ, "loss": 0.75})
    assert StepRecord.deferred(reader, **KNOWN) != StepRecord.deferred(other, **KNOWN)
    assert (reader.calls, other.calls) == (1, 1)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        pytest.param(repr, repr(PLAIN), id="repr"),
        pytest.param(lambda record: json.dumps(json.loads(record.to_json())), PLAIN.to_json(), id="json"),
        pytest.param(lambda record: record.to_json(indent=1), PLAIN.to_json(indent=1), id="indented json"),
    ],
)
def test_printing_reads_what_is_missing(reader: Reader, use: Callable[[StepRecord], str], text: str) -> None:
    assert use(StepRecord.deferred(reader, **KNOWN)) == text
    assert reader.calls == 1


def test_replace_changes_what_it_is_asked_to(reader: Reader) -> None:
    assert replace(StepRecord.deferred(reader, **KNOWN), loss=1.5) == replace(PLAIN, loss=1.5)


@pytest.mark.parametrize("name", ["los", "_read", "__dict__", "item", "_fields"])
def test_an_unknown_field_is_refused_at_once(reader: Reader, name: str) -> None:
    with pytest.raises(TypeError, match=f"StepRecord has no field '{name}'"):
        StepRecord.deferred(reader, **KNOWN, **{name: 1})
    assert reader.calls == 0


@pytest.mark.parametrize("name", ["los", "__array__", "__deepcopy__", "item"])
def test_an_unknown_attribute_is_none_and_reads_nothing(reader: Reader, name: str) -> None:
    for record in (PLAIN, StepRecord.deferred(reader, **KNOWN)):
        with pytest.raises(AttributeError, match=f"'StepRecord' object has no attribute '{name}'"):
            getattr(record, name)
        assert not hasattr(record, name)
    assert reader.calls == 0


@pytest.mark.parametrize("name", [*KNOWN, *READ, "other"])
def test_a_deferred_record_is_frozen(reader: Reader, name: str) -> None:
    record = StepRecord.deferred(reader, **KNOWN)
    with pytest.raises((FrozenInstanceError, TypeError)):
        setattr(record, name, 1)
    with pytest.raises((FrozenInstanceError, TypeError)):
        delattr(record, name)
    assert record == PLAIN


@pytest.mark.parametrize("error", [RuntimeError, KeyError, AttributeError, KeyboardInterrupt])
def test_an_error_while_reading_passes_and_the_record_can_be_read_later(error: type[BaseException]) -> None:
    broken = [error("the device is gone")]

    def read() -> Mapping[str, Any]:
        if broken:
            raise broken.pop()
        return READ

    record = StepRecord.deferred(read, **KNOWN)
    with pytest.raises(error, match="the device is gone"):
        _ = record.loss
    assert record.step == 7
    assert record == PLAIN


@pytest.mark.parametrize(
    ("given", "missing", "asked"),
    [
        ({"loss": 0.5}, "'grad_norm'", "grad_norm"),
        ({"loss": 0.5}, "'grad_norm'", "loss"),
        ({}, "'loss', 'grad_norm'", "loss"),
        ({"los": 0.5, "grad_norm": 2.0}, "'loss'", "grad_norm"),
    ],
)
def test_a_reader_that_leaves_a_field_out_is_named_as_the_cause(given: dict[str, Any], missing: str, asked: str) -> None:
    reader = Reader(given)
    record = StepRecord.deferred(reader, **KNOWN)
    with pytest.raises(TypeError, match=rf"read\(\) gave no {missing}; it must give \['loss', 'grad_norm'\]"):
        getattr(record, asked)
    with pytest.raises(TypeError, match="gave no"):
        hasattr(record, "loss")
    reader.values = READ
    assert record == PLAIN


def test_a_reader_cannot_change_what_was_known() -> None:
    record = StepRecord.deferred(Reader({**READ, "step": 99, "scale": 1.0, "nonsense": 1}), **KNOWN)
    assert record.loss == 0.5
    assert record == PLAIN
    assert not hasattr(record, "nonsense")


class Tensor(Reader):
    """A reader that is held by nothing but its record, as a tensor on a device would be."""


@pytest.mark.parametrize("known", [KNOWN, {**KNOWN, **READ}], ids=["after reading", "when all is known"])
def test_what_the_reader_holds_is_let_go(known: dict[str, Any]) -> None:
    held = Tensor()
    gone = weakref.ref(held)
    record = StepRecord.deferred(held, **known)
    assert record.loss == 0.5
    del held
    gc.collect()
    assert gone() is None
    assert record == PLAIN


def test_a_reader_is_held_until_it_is_read() -> None:
    held = Tensor()
    gone = weakref.ref(held)
    record = StepRecord.deferred(held, **KNOWN)
    del held
    gc.collect()
    assert gone() is not None
    assert record == PLAIN


def test_a_thread_that_comes_after_the_reading_gets_the_value(reader: Reader) -> None:
    record: Any = StepRecord.deferred(reader, **KNOWN)
    assert record == PLAIN
    # Between finding the slot empty and coming here, another thread has read.
    assert record.__getattr__("loss") == 0.5
    assert reader.calls == 1


def test_a_thread_that_asks_while_another_reads_gets_the_values() -> None:
    both_inside = threading.Barrier(2, timeout=10)

    def read() -> Mapping[str, Any]:
        both_inside.wait()
        return READ

    record = StepRecord.deferred(read, **KNOWN)
    seen: list[float] = []
    threads = [threading.Thread(target=lambda: seen.append(record.loss)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert seen == [0.5, 0.5]
    assert record == PLAIN


def test_with_every_field_known_nothing_is_read(reader: Reader) -> None:
    assert StepRecord.deferred(reader, **KNOWN, **READ) == PLAIN
    assert reader.calls == 0


def test_with_no_field_known_everything_that_has_no_default_is_read() -> None:
    reader = Reader({**KNOWN, **READ, **MORE})
    record = StepRecord.deferred(reader)
    assert record == PLAIN
    assert reader.calls == 1
    assert {field.name for field in fields(StepRecord)} == {*KNOWN, *READ, *MORE}
    assert {field.name for field in fields(StepRecord) if field.default is not MISSING} == {*MORE}


@pytest.mark.parametrize("name", MORE)
def test_a_field_with_a_default_is_at_hand_and_is_never_read(name: str) -> None:
    reader = Reader({**READ, **MORE})
    bare, given = StepRecord.deferred(reader, **KNOWN), StepRecord.deferred(reader, **KNOWN, **{name: MORE[name]})
    assert getattr(bare, name) == StepRecord.__dataclass_fields__[name].default
    assert getattr(given, name) == MORE[name]
    assert reader.calls == 0
    assert given == replace(PLAIN, **{name: MORE[name]}) != bare
    assert reader.calls == 2
