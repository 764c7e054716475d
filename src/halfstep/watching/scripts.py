"""Scripts: where their code is, and the `__main__` that Python makes for them."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType, ModuleType
from typing import final

from halfstep.errors import ConfigurationError, did_you_mean

__all__ = ["Program", "Script", "check_script", "load_script"]

_STANDARD_INPUT = "-"

_WHAT_RUNS = "Name what python runs: a file, a folder or zip file with a __main__.py in it, - for standard input, or -m and a module."


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What there is to run, in the words that Python would be given.

    Attributes:
        target: The path of a file, or of a folder or zip file that has a `__main__.py`; `-` for standard input; or the name of a module.
        arguments: What the script finds in `sys.argv[1:]`.
        is_module: Whether `target` is the name of a module, as after `python -m`.

    Example:
        >>> Script(target="train.py", arguments=("--run", "my run")).command
        "train.py --run 'my run'"
        >>> Script(target="research.train", is_module=True).command
        '-m research.train'
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> str:
        """The words after `python`, as a shell takes them."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script that can start at once.

    Attributes:
        execute: Runs it, in `sys.modules["__main__"]`.
        flush: Does what Python does as soon as its code is through, also after an exception.
        forget: Does what Python does when it is about to end, unless by `sys.exit`.
    """

    execute: Callable[[], object]
    flush: Callable[[], None]
    forget: Callable[[], None]


def check_script(script: Script) -> None:
    """Refuses what surely is not there, before anything slow begins. None of the script's code runs.

    Raises:
        ConfigurationError: There is no such file, or no such module.

    Example:
        >>> check_script(Script(target="research.train", is_module=True))
        Traceback (most recent call last):
        halfstep.errors.ConfigurationError: There is no module 'research' for -m research.train. ...
    """
    if script.is_module:
        _check_module(script.target)
    elif script.target != _STANDARD_INPUT and not os.path.exists(script.target):
        folder = os.path.dirname(script.target)
        with suppress(OSError):
            near = did_you_mean(os.path.basename(script.target), known=os.listdir(folder or "."))
            raise ConfigurationError(f"There is no {script.target!r} to run in {os.getcwd()}.{near} {_WHAT_RUNS}")
        raise ConfigurationError(f"There is no {script.target!r} to run, and no folder {folder!r}. {_WHAT_RUNS}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    # Whether the package has the module that is asked for, only its own code can tell, which must not run yet.
    with suppress(ValueError):
        if find_spec(top) is not None or PathFinder.find_spec(top, [os.getcwd()]) is not None:
            return
    file = f" For the file: halfstep run {name}" if os.path.exists(name) else ""
    raise ConfigurationError(f"There is no module {top!r} for -m {name}. Modules are looked for in {os.getcwd()} and in sys.path.{file}")


def load_script(script: Script) -> Program:
    """Makes this process that of a script: `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` are from here on as Python sets them.

    `runpy.run_path` is no help here: it takes `__main__` away again when the code is through, while functions registered with `atexit` and
    threads may still need it, and it gives `__main__` another `__file__`, `__loader__` and `__builtins__` than Python does.

    Raises:
        ConfigurationError: The file cannot be read.
        SyntaxError: That of the script.
    """
    main = _fresh_main()
    sys.modules["__main__"] = main
    if script.is_module:
        sys.argv[:] = ["-m", *script.arguments]
        _put_first(os.getcwd())
        return _module_program(script.target, alter_argv=True)
    sys.argv[:] = [script.target, *script.arguments]
    if script.target == _STANDARD_INPUT:
        _put_first("")
        source = b"" if sys.stdin is None else sys.stdin.buffer.read()
        return _file_program(main, "<stdin>", compile(source, "<stdin>", "exec", dont_inherit=True))
    # Python makes the path absolute, and leaves it as it is otherwise.
    path = os.path.join(os.getcwd(), script.target)
    if pkgutil.get_importer(path) is not None:
        _put_first(path, is_container=True)
        return _module_program("__main__", alter_argv=False)
    _put_first(_folder_of(script.target))
    loader, code = _read_file(path)
    main.__loader__ = loader
    return _file_program(main, path, code)


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    # Up to some version Python gives every `__main__` one.
    if "__annotations__" in vars(sys.modules["__main__"]):
        main.__annotations__ = {}
    vars(main)["__builtins__"] = builtins
    return main


def _folder_of(path: str) -> str:
    """The folder in which Python looks for what a script imports: that of the file which a link leads to."""
    # Two steps as in Python: a link may lead to what has no path, such as a pipe.
    with suppress(OSError):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    with suppress(OSError):
        path = os.path.realpath(path, strict=True)
    return os.path.dirname(path)


def _put_first(entry: str, *, is_container: bool = False) -> None:
    """Puts an entry into the place of the one that Python made for the launch of halfstep, if it made one."""
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[:0] = [entry] if is_container else []
    else:
        sys.path[:1] = [entry]


def _read_file(path: str) -> tuple[SourceFileLoader | SourcelessFileLoader, CodeType]:
    try:
        with io.open_code(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}. {_WHAT_RUNS}") from error
    if path.endswith(".pyc") or content.startswith(MAGIC_NUMBER):
        compiled = SourcelessFileLoader("__main__", path)
        code = compiled.get_code("__main__")
        assert code is not None
        return compiled, code
    return SourceFileLoader("__main__", path), compile(content, path, "exec", dont_inherit=True)


def _file_program(main: ModuleType, file: str, code: CodeType) -> Program:
    namespace = vars(main)
    namespace.update(__file__=file, __cached__=None)

    def forget() -> None:
        for name in ("__file__", "__cached__"):
            namespace.pop(name, None)

    return Program(execute=lambda: exec(code, namespace), flush=_flush, forget=forget)


def _module_program(name: str, *, alter_argv: bool) -> Program:
    # Private, and what `python -m` itself calls, by this name: so the module is found, its parents are imported, and the frames of a
    # traceback are, as they are there. The public `run_module` takes `__main__` away again, and cannot do so for a folder.
    run = runpy._run_module_as_main  # type: ignore[attr-defined]
    return Program(execute=lambda: run(name, alter_argv), flush=_nothing, forget=_nothing)


def _flush() -> None:
    for name in ("stderr", "stdout"):
        # The script may have taken them away. What else goes wrong, Python says when it tries again at its end.
        with suppress(Exception):
            getattr(sys, name).flush()


def _nothing() -> None:
    """What Python does for a module."""
