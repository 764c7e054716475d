"""Work that is done at the same time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

__all__ = ["together"]


def together(task: Callable[[], None], *others: Callable[[], None]) -> None:
    """Runs functions at the same time, each in a thread of its own but for the first one, and waits for all.

    Where Python starts no more threads, as while it shuts down, they run one after the other.

    Args:
        task: What runs in this thread.
        others: What runs beside it.

    Raises:
        BaseException: What the first of them that failed raised.

    Example:
        >>> done = []
        >>> together(lambda: done.append("here"), lambda: done.append("beside"))
        >>> sorted(done)
        ['beside', 'here']
    """
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    started: list[Thread] = []
    for other in others:
        thread = Thread(target=run, args=(other,), name="halfstep-archive", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            run(other)
        else:
            started.append(thread)
    run(task)
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
