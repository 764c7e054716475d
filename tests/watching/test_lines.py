"""The line of the user's code, found above whatever stands between."""

from __future__ import annotations

import inspect
import os
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from halfstep.records import UNKNOWN, Site
from halfstep.watching.lines import NOWHERE, Line, line_above, site_of

OWN = ["/home/me/train.py", "model/net.py", "/home/me/torch/halfstep.py"]
INSTALLED = f"{sysconfig.get_path('purelib')}{os.sep}lightning/loops.py"
LIBRARY = [INSTALLED, "/usr/lib/python3/dist-packages/ignite/engine.py"]
BETWEEN = [
    torch.optim.__file__,
    f"{Path(halfstep.__file__).parent}/watching/wrappers.py",
    threading.__file__,
    "<string>",
    "<frozen importlib._bootstrap>",
]

frames = st.lists(
    st.tuples(st.one_of(st.sampled_from(OWN), st.sampled_from(LIBRARY), st.sampled_from(BETWEEN)), st.integers(1, 40)), max_size=7
)


def caller(filename: str, number: int) -> Callable[..., Line]:
    """A function in a file, that calls another one at a line."""
    source = "\n" * (number - 1) + "def call(following, *rest): return following(*rest)"
    names: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), names)
    made: Callable[..., Line] = names["call"]
    return made


def innermost() -> Line:
    return line_above(getattr(inspect.currentframe(), "f_back", None))


def above(stack: list[tuple[str, int]]) -> Line:
    """What is found where functions in these files call one another, in a thread: there is nothing of a user's at its beginning."""
    found: list[Line] = []
    calls = [caller(*each) for each in stack]
    thread = threading.Thread(target=caller(threading.__file__, 1), args=(_kept(found), *calls, innermost))
    thread.start()
    thread.join()
    return found[0]


def _kept(found: list[Line]) -> Callable[..., None]:
    names: dict[str, Any] = {"found": found}
    exec(compile("def keep(following, *rest): found.append(following(*rest))", threading.__file__, "exec"), names)
    keep: Callable[..., None] = names["keep"]
    return keep


@given(frames)
def test_it_is_the_innermost_line_of_the_users_own(stack: list[tuple[str, int]]) -> None:
    libraries: list[Line] = []
    for file, number in reversed(stack):
        if file in OWN:
            expected = Line(file, number, is_direct=not libraries)
            break
        if file in LIBRARY:
            libraries.append(Line(file, number, is_direct=False))
    else:
        expected = libraries[0] if libraries else NOWHERE
    assert above(stack) == expected


def test_the_frame_itself_counts() -> None:
    line = line_above(inspect.currentframe())
    assert line == Line(__file__, line.number, is_direct=True)
    assert inspect.getsource(inspect.getmodule(inspect.currentframe()) or os).splitlines()[line.number - 1].strip().startswith("line = ")


def test_no_frame_is_nowhere() -> None:
    assert line_above(None) is NOWHERE


@pytest.mark.parametrize("again", [1, 2])
def test_a_code_object_that_takes_the_place_of_another_is_looked_at_anew(again: int) -> None:
    """Answers are kept by the identity of code, which could come back."""
    for file in (INSTALLED, OWN[0], torch.__file__, OWN[1]) * again:
        assert above([(file, 3)]) == (NOWHERE if file == torch.__file__ else Line(file, 3, is_direct=file in OWN))


def test_a_site_is_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert site_of(Line(str(tmp_path / "src" / "train.py"), 4, is_direct=True)) == Site(module=UNKNOWN, file="src/train.py", line=4)
    assert site_of(Line("/elsewhere/train.py", 4, is_direct=True), module="head").file == "/elsewhere/train.py"


def test_a_site_needs_no_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert site_of(Line("/home/me/train.py", 4, is_direct=True)).line == 4
