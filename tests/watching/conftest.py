"""What the tests of watching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from halfstep.watching import passes
from halfstep.watching.scene import Scene
from tests.watching.sessions import Session
from tests.watching.test_restoration import differences, everything, hooks


@pytest.fixture(scope="module")
def alone_in_process() -> Iterator[None]:
    """A watch finds optimizers and scalers among all objects there are. What other tests have left is none of its business here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something, after which a watch opens no dispatch mode."""
    monkeypatch.setattr(passes, "compiler_is_in_use", lambda: False)


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """What goes wrong in a watch itself ends the watch, and not the script. A test in which that happens empties this list."""
    seen: list[Exception] = []
    failed = Scene.failed

    def see(self: Scene, error: Exception) -> None:
        failed(self, error)  # It raises what is meant to reach the script.
        seen.append(error)

    monkeypatch.setattr(Scene, "failed", see)
    yield seen
    assert seen == []


@pytest.fixture
def untouched() -> Iterator[None]:
    """Torch is in the end what it was in the beginning."""
    Session().step()  # torch wraps the step of a class of optimizers by itself when the first one is made
    before, waiting = everything(), hooks()
    yield
    assert differences(before, everything()) == set()
    assert hooks() == waiting
