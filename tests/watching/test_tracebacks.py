from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from halfstep.watching.tracebacks import strip_frames

PACKAGE = Path(halfstep.__file__).parent

# Where functions are made to lie that stand for a script, for torch, and for parts of halfstep.
SCRIPT, TORCH, WATCH, CLI, MONITOR, JOURNAL, ENGINE, OTHER = (
    "/home/user/train.py",
    "/lib/torch/optim/sgd.py",
    *(str(PACKAGE / name / "some.py") for name in ("watching", "cli", "monitor", "journal", "engine")),
    f"{PACKAGE}/watched.py",
)


def through(file: str, called: Callable[[], Any]) -> Callable[[], Any]:
    """A function in a file that calls another."""
    names: dict[str, Any] = {"called": called}
    exec(compile("def function():\n    return called()\n", file, "exec"), names)
    function: Callable[[], Any] = names["function"]
    return function


def chain(*files: str, last: Callable[[], Any]) -> Callable[[], Any]:
    """Functions in these files, each of which calls the next one."""
    for file in reversed(files):
        last = through(file, last)
    return last


def fail() -> Any:
    raise ValueError("here")


def raised(function: Callable[[], Any]) -> Exception:
    """The error that a function raises, with a traceback that begins there."""
    try:
        function()
    except Exception as error:
        # Without the frame of this function.
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError


def files(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([SCRIPT], [SCRIPT]),
        ([WATCH, SCRIPT], [SCRIPT]),
        ([SCRIPT, WATCH, TORCH, WATCH, SCRIPT], [SCRIPT, TORCH, SCRIPT]),
        ([CLI, WATCH], []),
        ([SCRIPT, WATCH, MONITOR, JOURNAL, MONITOR], [SCRIPT]),
        ([SCRIPT, WATCH, MONITOR, SCRIPT, MONITOR], [SCRIPT, SCRIPT, MONITOR]),
        ([SCRIPT, MONITOR, JOURNAL], [SCRIPT, MONITOR, JOURNAL]),
        ([SCRIPT, ENGINE, WATCH, ENGINE, OTHER], [SCRIPT, ENGINE, ENGINE, OTHER]),
    ],
)
def test_which_frames_go(before: list[str], after: list[str]) -> None:
    error = raised(chain(*before, last=fail))
    strip_frames(error)
    assert files(error) == [*after, __file__]


def test_what_led_to_a_launch_goes_with_it() -> None:
    launch = chain(WATCH, last=chain(SCRIPT, TORCH, last=fail))
    error = raised(chain("/bin/halfstep", TORCH, last=launch))
    strip_frames(error, below=launch.__code__)
    assert files(error) == [SCRIPT, TORCH, __file__]


def test_causes_contexts_and_groups() -> None:
    def cause() -> None:
        try:
            chain(WATCH, SCRIPT, last=fail)()
        except ValueError as error:
            raise KeyError from error

    def context() -> None:
        try:
            chain(TORCH, WATCH, last=cause)()
        except KeyError:
            raise builtins.ExceptionGroup("several", [raised(chain(SCRIPT, WATCH, last=fail)), TypeError()])  # noqa: B904

    error = raised(chain(SCRIPT, WATCH, last=context))
    strip_frames(error)
    assert isinstance(error, builtins.ExceptionGroup)
    assert files(error) == [SCRIPT, __file__]
    assert files(error.exceptions[0]) == [SCRIPT, __file__]
    assert files(error.__context__) == [__file__, TORCH, __file__]
    assert files(error.__context__.__cause__ if error.__context__ else None) == [__file__, SCRIPT, __file__]


def test_errors_that_are_each_other_s_cause() -> None:
    first, second = raised(chain(WATCH, last=fail)), raised(chain(SCRIPT, WATCH, last=fail))
    first.__cause__, second.__cause__ = second, first
    strip_frames(first)
    assert (files(first), files(second)) == ([__file__], [SCRIPT, __file__])


@given(st.lists(st.sampled_from([SCRIPT, TORCH, WATCH, CLI, ENGINE, MONITOR])))
def test_what_is_kept_is_unchanged_and_twice_is_once(where: list[str]) -> None:
    error = raised(chain(*where, last=fail))
    before = [(entry.filename, entry.lineno, entry.line) for entry in traceback.extract_tb(error.__traceback__)]
    strip_frames(error)
    once = [(entry.filename, entry.lineno, entry.line) for entry in traceback.extract_tb(error.__traceback__)]
    strip_frames(error)
    assert [(entry.filename, entry.lineno, entry.line) for entry in traceback.extract_tb(error.__traceback__)] == once
    rest = iter(before)
    assert all(entry in rest for entry in once), "in the order that they had"
    assert not {WATCH, CLI} & {entry[0] for entry in once}
    assert [entry for entry in once if entry[0] in {SCRIPT, TORCH, ENGINE}] == [e for e in before if e[0] in {SCRIPT, TORCH, ENGINE}]
