"""A task: the model, optimizer, loss and batches that halfstep measures, diagnoses and tunes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from reprlib import repr as short
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import HalfstepError, InvalidTypeError, TaskError, did_you_mean
from halfstep.numerics import is_foreign
from halfstep.randomness import RandomState, seed_everything

__all__ = ["BatchStream", "Task", "TaskFactory", "blame", "blamed", "fresh_task", "load_task", "make_task", "task_name"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training problem: everything that a training step needs, on the CPU and before the first step.

    Attributes:
        model: The model, with parameters in fp32.
        optimizer: An optimizer over the model's parameters.
        loss: `loss(model, batch)`: runs the model and returns the loss as a scalar tensor. It enters no autocast region of its own.
        batches: The batches: a list, a `DataLoader` or any other iterable. It is started again when it ends, where it can be.

    Raises:
        InvalidTypeError: A field holds something else.

    Example:
        >>> import torch
        >>> def task(seed: int) -> Task:
        ...     model = torch.nn.Linear(4, 1)
        ...     return Task(
        ...         model=model,
        ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...         loss=lambda model, batch: model(batch).square().mean(),
        ...         batches=[torch.randn(8, 4)],
        ...     )
        >>> type(task(0).model).__name__
        'Linear'
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    batches: Iterable[Any]

    def __post_init__(self) -> None:
        _expect(isinstance(self.model, nn.Module), self.model, field="model", allowed="a torch.nn.Module")
        _expect(isinstance(self.optimizer, Optimizer), self.optimizer, field="optimizer", allowed="a torch.optim.Optimizer")
        loss, batches = cast("object", self.loss), cast("object", self.batches)  # annotations promise nothing at run time
        function = callable(loss) and not isinstance(loss, type)
        _expect(function, loss, field="loss", allowed="a function loss(model, batch) that returns a scalar tensor")
        iterable = isinstance(batches, Iterable) and not isinstance(batches, Tensor | str | bytes | dict)
        _expect(iterable, batches, field="batches", allowed="an iterable of batches, such as a list or a DataLoader")


TaskFactory: TypeAlias = Callable[[int], Task]


def _expect(fits: bool, value: object, *, field: str, allowed: str) -> None:  # noqa: FBT001
    if not fits:
        raise InvalidTypeError(f"Task({field}=...) was given {_describe(value)}; it takes {allowed}.")


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an instance"
    if isinstance(value, FunctionType):
        return f"the function {value.__qualname__} itself, not what it returns"
    return f"{' '.join(short(value).split())} (type {type(value).__name__})"


def load_task(name: str) -> TaskFactory:
    """The factory that a task's name stands for.

    Args:
        name: `path/to/file.py:factory`, or `package.module:factory`. The file's folder, or the working directory for a module, is
            put first on `sys.path`, as Python itself does for a script.

    Returns:
        A function `factory(seed) -> Task`. `make_task` calls it and checks what it returns.

    Raises:
        TaskError: There is no such file, module or factory, or importing it fails or calls `sys.exit()`; the message says which, and
            where.

    Example:
        >>> load_task("examples/char_transformer.py")
        Traceback (most recent call last):
        ...
        halfstep.errors.TaskError: 'examples/char_transformer.py' names no factory. ...
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise TaskError(
            f"{name!r} names no factory. A task is named as path/to/file.py:factory or package.module:factory, "
            "where factory is a function that takes a seed and returns a halfstep.Task."
        )
    module = _import_file(Path(place)) if place.endswith(".py") or "/" in place or "\\" in place else _import_module(place)
    if not hasattr(module, function):
        own = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == module.__name__]
        listed = ", ".join(sorted(own)) or "nothing that can be called"
        raise TaskError(f"{place} has no factory named {function!r}; it defines {listed}.{did_you_mean(function, known=own)}")
    factory: object = getattr(module, function)
    if not callable(factory):
        raise TaskError(
            f"{name} is {_describe(factory)}, not a factory. A factory is a function that takes a seed and returns a halfstep.Task."
        )
    named: TaskFactory = factory
    return named


def _import_file(path: Path) -> ModuleType:
    if path.is_dir() or path.suffix != ".py":
        kind = "a folder" if path.is_dir() else "no Python file"
        raise TaskError(f"{str(path)!r} is {kind}. A task is named as path/to/file.py:factory.")
    if not path.is_file():
        siblings = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise TaskError(f"There is no file {str(path)!r}.{did_you_mean(path.name, known=siblings)}")
    file = path.resolve()
    _put_first_on_path(file.parent)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(spec.name, None)
        if isinstance(error, Exception | SystemExit):
            raise _import_failure(str(path), error) from error
        raise
    return module


def _module_name(file: Path) -> str:
    """The file's own name where Python imports this very file by it, as the workers of a DataLoader do, and a unique one elsewhere.

    A unique name keeps a file called, say, types.py from hiding the module that it is called like, and two files of one name from hiding
    each other.
    """
    if file.stem.isidentifier():
        known = sys.modules.get(file.stem)
        found = importlib.util.find_spec(file.stem) if known is None else None
        if str(file) == (getattr(known, "__file__", None) if found is None else found.origin):
            return file.stem
    stem = re.sub(r"[^0-9A-Za-z_]", "_", file.stem)
    return f"halfstep_task_{stem}_{sha256(os.fsencode(file)).hexdigest()[:12]}"


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise TaskError(
            f"{name!r} is neither a Python file nor a module. A task is named as path/to/file.py:factory or package.module:factory."
        )
    if Path(name).is_file():
        raise TaskError(f"{name!r} is no Python file. A task is named as path/to/file.py:factory.")
    _put_first_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise TaskError(f"There is no module {name!r}: no package or file {missing!r} is on sys.path.") from error
        raise _import_failure(name, error) from error


def _import_failure(place: str, error: Exception | SystemExit) -> TaskError:
    if isinstance(error, SystemExit):
        return TaskError(
            f"{place} ended the program while it was imported: {blame(error)}. "
            'What is meant for `python file.py` alone belongs under `if __name__ == "__main__":`.'
        )
    return TaskError(f"{place} could not be imported: {blame(error)}")


def _put_first_on_path(folder: Path) -> None:
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


def make_task(factory: TaskFactory, *, seed: int) -> Task:
    """The task that a factory makes from a seed.

    Raises:
        TaskError: The factory raises, or returns something other than a `Task`. `SystemExit` and `KeyboardInterrupt` pass through.

    Example:
        >>> make_task(lambda seed: None, seed=0)
        Traceback (most recent call last):
        ...
        halfstep.errors.TaskError: The factory '<lambda>' returned None; it must return a halfstep.Task.
    """
    function = factory.func if isinstance(factory, partial) else factory
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        task: object = factory(seed)
    except Exception as error:
        raise TaskError(f"The factory {name!r} failed with seed {seed}: {blame(error)}") from error
    if not isinstance(task, Task):
        returned = "None" if task is None else _describe(task)
        raise TaskError(f"The factory {name!r} returned {returned}; it must return a halfstep.Task.")
    return task


def task_name(task: str | TaskFactory) -> str:
    """What a task is called in reports: the name it was given by, or that of its factory.

    Example:
        >>> task_name("train.py:task"), task_name(load_task)
        ('train.py:task', 'load_task')
    """
    return task if isinstance(task, str) else str(getattr(task, "__qualname__", type(task).__name__))


def blame(error: BaseException) -> str:
    """An exception in one line: its type, its message and the line of the user's code that it came from.

    Args:
        error: A caught exception, with its traceback.

    Returns:
        Such as `ValueError: bad size (train.py:12, in loss)`. The line is the innermost one outside Python, installed packages and
        halfstep.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_foreign(frame.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        text, where = error.msg, f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {text}{where}"


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """A block in which an exception from the task's code or from an operation becomes a TaskError; one that calls sys.exit() fails, too.

    Args:
        what: What failed, as the beginning of the message.

    Example:
        >>> with blamed("The step failed"):
        ...     raise ValueError("bad size")
        Traceback (most recent call last):
        ...
        halfstep.errors.TaskError: The step failed: ValueError: bad size...
    """
    try:
        yield
    except HalfstepError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what}: {blame(error)}") from error


@contextmanager
def fresh_task(factory: TaskFactory, *, seed: int, device: torch.device) -> Iterator[Task]:
    """A task from its seed, its model on a device and in training mode; the generators of random numbers are put back at the end.

    Raises:
        TaskError: The task cannot be made, or not be moved to the device.

    Example:
        >>> with fresh_task(lambda seed: None, seed=0, device=torch.device("cpu")) as task:
        ...     pass
        Traceback (most recent call last):
        ...
        halfstep.errors.TaskError: The factory '<lambda>' returned None; it must return a halfstep.Task.
    """
    outside = RandomState.capture()
    try:
        seed_everything(seed)
        with blamed(f"The task could not be set up with seed {seed}"):
            task = make_task(factory, seed=seed)
            task.model.to(device=device)
            task.model.train()
        yield task
    finally:
        outside.restore()


_END = object()


@final
class BatchStream:
    """A task's batches without an end: the iterable is started again whenever it runs out.

    Example:
        >>> stream = BatchStream([1, 2])
        >>> [next(stream) for _ in range(5)]
        [1, 2, 1, 2, 1]

    Attributes:
        has_ended: Whether there are no more batches, since the iterable cannot be started again.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.has_ended = False
        self._batches = batches
        self._iterator = self._start()
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            TaskError: There are no batches at all, or no more and they cannot be started again, or making one fails.
        """
        batch = self._draw()
        if batch is _END:
            self._iterator = self._start()
            batch = self._draw()
        if batch is not _END:
            self._given += 1
            return batch
        self.has_ended = self._given > 0
        if self._given == 0:
            raise TaskError("The task has no batches: Task(batches=...) is empty. Give at least one batch.")
        raise TaskError(
            f"The task's batches ended after {self._given} and cannot be started again. "
            "Give a list, a DataLoader or a generator that does not end instead of an iterator."
        )

    def _draw(self) -> Any:
        try:
            return next(self._iterator, _END)
        except Exception as error:
            raise TaskError(f"Batch {self._given + 1} could not be made: {blame(error)}") from error

    def _start(self) -> Iterator[Any]:
        try:
            return iter(self._batches)
        except Exception as error:
            raise TaskError(f"The task's batches could not be started: {blame(error)}") from error
