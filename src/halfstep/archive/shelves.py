"""Folders in which checkpoints lie: their names, which there are, and how one comes in."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Final
from uuid import uuid4

from halfstep.archive.wording import unreadable, unwritable
from halfstep.errors import ConfigurationError
from halfstep.records import CheckpointKind

__all__ = ["checkpoint_name", "checkpoints_in", "clear_parts", "part_of", "publish", "remove", "step_of"]

_NAME: Final = re.compile(r"step-(\d{8,})(\.pt)?", re.ASCII)
_PART: Final = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})-(?P<process>\d{1,10})-(?P<token>[0-9a-f]{8})-\d+\.part", re.ASCII | re.DOTALL)

# Names on disk have 255 bytes at most.
_LONGEST: Final = 180

_DAY: Final = 24 * 60 * 60

# Whose parts are whose: a process that is killed may be followed by one with the same number, such as 1 in a container.
_HOST: Final = sha256(socket.gethostname().encode()).hexdigest()[:8]
_TOKEN: Final = uuid4().hex[:8]
_numbers: Final = count()


def checkpoint_name(step: int, *, kind: CheckpointKind) -> str:
    """What a checkpoint is called.

    Args:
        step: The number of its step.
        kind: `file`, or `folder` where several processes write it.

    Raises:
        ConfigurationError: The number is negative.

    Example:
        >>> checkpoint_name(100, kind="file"), checkpoint_name(100, kind="folder")
        ('step-00000100.pt', 'step-00000100')
    """
    if step < 0:
        raise ConfigurationError(f"A checkpoint cannot be that of step {step}. Count steps from 0 or 1.")
    return f"step-{step:08d}{'.pt' if kind == 'file' else ''}"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder with their steps, the one with the highest step first. Only names are looked at.

    Args:
        folder: The folder; one that does not exist has none.

    Raises:
        CheckpointError: The folder cannot be read.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> for name in ("step-00000100.pt", "step-00000200.pt", "notes.txt"):
        ...     (folder / name).touch()
        >>> [(step, path.name) for step, path in checkpoints_in(folder)]
        [(200, 'step-00000200.pt'), (100, 'step-00000100.pt')]
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    found = [(step, folder / name) for name in sorted(names) if (step := step_of(name)) is not None]
    return sorted(found, key=lambda one: one[0], reverse=True)


def step_of(name: str) -> int | None:
    """The step of a checkpoint of that name; `None` where it is not the name of one.

    Example:
        >>> step_of("step-00000100.pt"), step_of("step-00000100"), step_of("notes.txt")
        (100, 100, None)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # Of numbers with more zeros in front than ours, there would be two names for one step.
    return step if name == checkpoint_name(step, kind="file" if match[2] else "folder") else None


def part_of(path: Path) -> Path:
    """The name under which a checkpoint is written before it is published: aside of it, and another one at each call.

    Example:
        >>> part = part_of(Path("runs/a/step-00000100.pt"))
        >>> part.parent.as_posix(), part.name.startswith(".step-00000100.pt."), part.suffix
        ('runs/a', True, '.part')
    """
    place = _target(path)
    name = place.name if len(os.fsencode(place.name)) <= _LONGEST else sha256(os.fsencode(place.name)).hexdigest()
    return place.with_name(f".{name}.{_HOST}-{os.getpid()}-{_TOKEN}-{next(_numbers)}.part")


def clear_parts(folder: Path) -> None:
    """Removes what processes left that were killed while they wrote a checkpoint.

    What a process of this machine writes stays as long as it runs; what others write, for a day after they last wrote.

    Args:
        folder: Where checkpoints lie. Where it does not exist, or cannot be read or written, nothing happens.

    Example:
        >>> from tempfile import mkdtemp
        >>> part = part_of(Path(mkdtemp(), "step-00000100.pt"))
        >>> part.touch()
        >>> clear_parts(part.parent)  # This process runs, and may be writing it still.
        >>> part.exists()
        True
    """
    try:
        paths = [*folder.iterdir()]
    except (OSError, ValueError):
        return
    for path in paths:
        match = _PART.fullmatch(path.name)
        if match and _is_left(path, host=match["host"], process=int(match["process"]), token=match["token"]):
            with suppress(OSError):
                remove(path)


def _is_left(path: Path, *, host: str, process: int, token: str) -> bool:
    if host != _HOST or os.name != "posix":
        return _age(path) > _DAY
    if process == os.getpid():
        return token != _TOKEN
    return not _is_running(process)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _age(path: Path) -> float:
    """How many seconds ago it was last written to; none for what is gone by now."""
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        return time.time() - max(file.lstat().st_mtime for file in files)
    except OSError:
        return 0.0


def remove(path: Path) -> None:
    """Removes a checkpoint, a file or a folder. A folder loses its name first, so that half of one is never taken for a checkpoint.

    Args:
        path: The checkpoint. Of a link, what it leads to stays.

    Raises:
        OSError: It is not there, or cannot be removed.

    Example:
        >>> from tempfile import mkdtemp
        >>> checkpoint = Path(mkdtemp(), "step-00000100")
        >>> checkpoint.mkdir()
        >>> remove(checkpoint)
        >>> checkpoint.exists()
        False
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not _PART.fullmatch(path.name):
        path = path.rename(part_of(path))
    shutil.rmtree(path)


def publish(part: Path, path: Path) -> None:
    """Gives a checkpoint that is wholly written its name, and returns when that is on disk.

    A file takes the place of an older one at once: whoever reads sees the one or the other. A folder cannot: the older one is renamed,
    the new one takes its name, and the older one is removed. A machine that fails in the instant between the first two leaves both under
    names that `clear_parts` removes, so that this step has no checkpoint; those of other steps are untouched.

    Args:
        part: The checkpoint, a file or a folder, in the folder of `path`: `part_of(path)`.
        path: Its name.

    Raises:
        CheckpointError: It cannot be renamed, or is a file where the name is that of a folder, or the other way round. What had the name
            before has it still.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp(), "step-00000100.pt")
        >>> part = part_of(path)
        >>> part.touch()
        >>> publish(part, path)
        >>> path.exists(), part.exists()
        (True, False)
    """
    place = _target(path)
    try:
        if part.is_dir():
            _flush_folder(part)
        if part.exists() and place.exists() and place.is_dir() != part.is_dir():
            raise FileExistsError(errno.EEXIST, "a folder is not replaced by a file, nor a file by a folder", str(path))
        if place.is_dir():
            _exchange(part, place)
        else:
            part.replace(place)
        _flush_folder(place.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def _exchange(part: Path, place: Path) -> None:
    older = part_of(place)
    place.rename(older)
    try:
        part.rename(place)
    except BaseException:
        older.rename(place)
        raise
    with suppress(OSError):
        remove(older)


def _target(path: Path) -> Path:
    """The path, or what a link of that name leads to: the link stays one."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _flush_folder(folder: Path) -> None:
    """Has the names in a folder written to disk."""
    if os.name != "posix":  # Windows opens no folders.
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems know no such thing.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
