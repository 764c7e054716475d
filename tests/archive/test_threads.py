"""Work that is done at the same time."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from halfstep.archive.threads import together


def test_it_is_done_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def meet() -> None:
        meeting.wait()

    together(meet, meet, meet)


def test_all_is_done_when_it_returns() -> None:
    here, done = threading.Event(), []

    def beside() -> None:
        here.wait(60)
        done.append(threading.current_thread() is threading.main_thread())

    together(here.set, beside, beside)
    assert done == [False, False]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_raises_is_raised_after_all_are_done(place: int) -> None:
    failed, done = threading.Event(), []

    def fail() -> NoReturn:
        failed.set()
        raise OSError(28, "No space left on device")

    def work() -> None:
        failed.wait(60)
        done.append("work")

    tasks = [work, work, work]
    tasks[place] = fail
    with pytest.raises(OSError, match="No space left on device"):
        together(*tasks)
    assert done == ["work", "work"]


def test_without_threads_it_is_done_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[str] = []
    together(lambda: done.append("first"), lambda: done.append("second"))
    assert sorted(done) == ["first", "second"]
