"""The errors: what they derive from, and the hints that they give."""

from __future__ import annotations

import pickle

import pytest

from halfstep import errors
from halfstep.errors import HalfstepError, HalfstepWarning, InvalidTypeError, TaskError, did_you_mean

MISTAKES = {
    errors.CheckpointError: RuntimeError,
    errors.ConfigurationError: ValueError,
    errors.DamagedCheckpointError: ValueError,
    errors.InvalidTypeError: TypeError,
    errors.PersistentSkipsError: RuntimeError,
    errors.RanksDisagreeError: RuntimeError,
    errors.RecordFormatError: ValueError,
    errors.StepOrderError: RuntimeError,
    errors.TaskError: RuntimeError,
    errors.UnscaledBackwardError: RuntimeError,
}


def error_classes() -> list[type[HalfstepError]]:
    return sorted(HalfstepError.__subclasses__(), key=lambda cls: cls.__name__)


def test_every_error_stands_in_the_table_of_this_test() -> None:
    defined = [cls for cls in error_classes() if cls.__module__ == errors.__name__]
    assert set(defined) == set(MISTAKES)


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_a_mistake_also_derives_from_a_built_in(cls: type[HalfstepError]) -> None:
    built_in = [base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (Exception, BaseException, object)]
    assert built_in
    assert built_in[0] is MISTAKES.get(cls, built_in[0])
    with pytest.raises(built_in[0], match="what was passed"):
        raise cls("what was passed")


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_is_pickled_with_its_message(cls: type[HalfstepError]) -> None:
    twin = pickle.loads(pickle.dumps(cls("a message")))
    assert type(twin) is cls
    assert twin.args == ("a message",)


def test_every_error_is_caught_by_the_base() -> None:
    with pytest.raises(HalfstepError, match="lost"):
        raise TaskError("lost")
    assert not issubclass(InvalidTypeError, ValueError)


def test_all_names_every_error_and_no_other() -> None:
    public = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert set(errors.__all__) == public | {"did_you_mean"}


def test_the_warning_is_a_user_warning_and_no_error() -> None:
    assert issubclass(HalfstepWarning, UserWarning)
    assert not issubclass(HalfstepWarning, HalfstepError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("fp61", ["fp32", "bf16", "fp16"], " Did you mean 'fp16'?"),
        ("pf16", ["fp32", "bf16", "fp16"], " Did you mean 'bf16' or 'fp16'?"),
        ("BF16", ["fp32", "bf16"], ""),
        ("fp16", ["fp16"], " Did you mean 'fp16'?"),
        ("tensorfloat", ["fp32"], ""),
        ("anything", [], ""),
        ("", ["fp32"], ""),
        ("taks", ["task", "tasks", "tusk"], " Did you mean 'task' or 'tasks'?"),
        ("it's", ["its"], " Did you mean 'its'?"),
    ],
)
def test_a_hint_names_what_is_near(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known=known) == hint


def test_a_hint_takes_any_iterable_once() -> None:
    assert did_you_mean("fp61", known=(name for name in ["fp16", "other"])) == " Did you mean 'fp16'?"


def test_a_hint_names_two_at_most_in_order() -> None:
    assert did_you_mean("abcd", known=["abce", "abcf", "abcg", "abch"]).count("'") == 4
    assert did_you_mean("step", known={"steps": 1, "stepa": 2}) == " Did you mean 'stepa' or 'steps'?"
