"""Running a script as Python itself would, while it is watched."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from traceback import format_exception_only, print_exc
from types import TracebackType
from typing import NoReturn, final

from halfstep.errors import HalfstepError
from halfstep.watching.imports import FirstImport
from halfstep.watching.scripts import Program, Script, load_script
from halfstep.watching.tracebacks import strip_frames

__all__ = ["run_script"]

_COULD_NOT_RUN = 2


def run_script(script: Script, *, watcher: Callable[[], AbstractContextManager[object]], begins_after: str | None = None) -> None:
    """Runs a script as Python itself would, under a watcher.

    The script sees itself as `__main__`, its own `sys.argv` and `sys.path[0]`, and keeps them until the process ends. What it raises leaves
    this function, so that Python prints it and sets the exit status, also that of Ctrl-C; halfstep's frames are taken out of the traceback
    before `sys.excepthook` sees it, whichever hook that is by then. So nothing but the end of the process should follow on this call, and
    no `except` should stand around it.

    What halfstep itself has to say goes to standard error, in lines that begin with `halfstep: `.

    Args:
        script: What to run.
        watcher: Makes the context that the script runs in. It is left in whichever way the script ends, except by `os._exit` or a signal
            that kills, and before Python prints the traceback; not by processes that the script forked. When it fails on being left, the
            script has still ended as it did, unless all was well and what the watcher raises is a `HalfstepError`: then that is the end.
        begins_after: The name of a module. The context is not entered before the script has imported that, so that its import sees the
            environment and the folders that the script prepared for it, such as `OMP_NUM_THREADS`; `None` to enter at once.

    Raises:
        SystemExit: The script's own; or with the code 2, when there is no such script or the watcher refused to begin.

    Example:
        >>> from contextlib import nullcontext
        >>> run_script(Script(target="train.py", arguments=("--epochs", "3")), watcher=nullcontext)  # doctest: +SKIP
    """
    try:
        program = load_script(script)
    except HalfstepError as error:
        _refuse(str(error))
    except BaseException:
        _strip_what_is_printed(None)
        raise
    watching = _Watching(watcher, begins_after=begins_after)
    watching.expect()
    ending = _execute(program)
    try:
        watching.end(ending)
        if ending is not None:
            raise ending
    except BaseException:
        _strip_what_is_printed(program)
        raise
    finally:
        # The frame is part of the traceback: a cycle would keep the script's variables alive longer than Python does.
        del ending
    program.forget()


@final
class _Watching:
    """The watcher of one launch. The process that began it ends it, and no child that was forked does."""

    def __init__(self, watcher: Callable[[], AbstractContextManager[object]], *, begins_after: str | None) -> None:
        self._watcher = watcher
        self._owner = os.getpid()
        self._entered: AbstractContextManager[object] | None = None
        self._awaited = begins_after
        self._import = None if begins_after is None else FirstImport(begins_after, called=self._begin)

    def expect(self) -> None:
        """Begins, or waits for the import after which it begins."""
        if self._import is None:
            self._begin()
        else:
            self._import.expect()

    def end(self, ending: BaseException | None) -> None:
        """Ends, after a script that ended so."""
        all_was_well = ending is None or (isinstance(ending, SystemExit) and not ending.code)
        if self._import is not None:
            self._import.forget()
        if os.getpid() != self._owner:
            return
        if self._entered is None:
            if all_was_well:
                _tell(f"{self._awaited} was not imported, so there was nothing to watch.")
            return
        try:
            if ending is None:
                self._entered.__exit__(None, None, None)
            else:
                self._entered.__exit__(type(ending), ending, ending.__traceback__)
        except BaseException as failure:
            if all_was_well and (isinstance(failure, HalfstepError) or not isinstance(failure, Exception)):
                raise
            what = format_exception_only(type(failure), failure)[-1].strip()
            _tell(f"the run's log could not be finished; what was written before is kept ({what}).")

    def _begin(self) -> None:
        try:
            entered = self._watcher()
            entered.__enter__()
        except HalfstepError as error:
            _refuse(str(error))
        except Exception:
            # By name here, since it would have no frame left where Python prints it.
            print_exc()
            _refuse("this is a bug in halfstep; please report it with the traceback above.")
        self._entered = entered


def _execute(program: Program) -> BaseException | None:
    try:
        try:
            program.execute()
        finally:
            program.flush()
    except SystemExit as ending:
        # This is how runpy says that there is no such module, or nothing in it to run.
        if isinstance(ending.__context__, runpy._Error):  # type: ignore[attr-defined]
            _tell(f"{str(ending.__context__).rstrip('.')}.")
            return SystemExit(_COULD_NOT_RUN)
        return ending
    except BaseException as ending:
        return ending
    return None


def _strip_what_is_printed(program: Program | None) -> None:
    """Has Python call the hook for uncaught exceptions with a traceback that halfstep has no part in.

    Only now, not before the script runs: it finds the hook as it would without halfstep, and the hook that it sets itself is kept.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        strip_frames(error, below=run_script.__code__)
        # Python has set it by now, with all frames.
        sys.last_traceback = trace = error.__traceback__
        try:
            hook(kind, error, trace)
        except SystemExit:
            raise
        except BaseException as failure:
            # As Python does, for which this function would be a part of the hook.
            strip_frames(failure, below=show.__code__)
            _write("Error in sys.excepthook:")
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            _write("\nOriginal exception was:")
            sys.__excepthook__(kind, error, trace)
        finally:
            if program is not None:
                program.forget()

    sys.excepthook = show


def _refuse(message: str) -> NoReturn:
    _tell(message)
    sys.exit(_COULD_NOT_RUN)


def _tell(message: str) -> None:
    _write(f"halfstep: {message}")


def _write(line: str) -> None:
    # Nobody may be there to read it, which must not change how the script ends.
    with suppress(Exception):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
