"""What is found where a checkpoint should be."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from halfstep.archive.folders import FOLDER_FILE
from halfstep.archive.opening import opened
from halfstep.archive.recognition import foreign_kind
from halfstep.archive.shelves import checkpoints_in, step_of
from halfstep.archive.structures import foreign_name
from halfstep.archive.verification import read_record, verify
from halfstep.archive.wording import plain
from halfstep.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from halfstep.records import CheckpointRecord, Inspection

__all__ = ["inspect_path", "places_of"]

Check = Callable[[Path], CheckpointRecord]


def inspect_path(path: Path, *, check: Check = verify) -> Inspection:
    """What is found where a checkpoint should be: what it says about itself, and what is wrong with it.

    Args:
        path: The checkpoint, a file or a folder.
        check: What finds out whether it is valid: `verify`, or `read_record`, which does not read the tensors.

    Raises:
        CheckpointError: There is nothing.

    Example:
        >>> inspect_path(Path("no/such/step-00000100.pt"))
        Traceback (most recent call last):
        ...
        halfstep.errors.CheckpointError: There is no checkpoint at no/such/step-00000100.pt.
    """
    record: CheckpointRecord | None = None
    fault = ""
    try:
        record = check(path)
        fault = _foreign(path)
    except DamagedCheckpointError as error:
        fault = str(error)
        # It may be the data alone that is damaged.
        with suppress(DamagedCheckpointError, CheckpointError):
            record = read_record(path)
    except CheckpointError as error:
        if not os.path.exists(path):
            raise
        fault = str(error)
    return Inspection(
        path=str(path),
        kind="folder" if os.path.isdir(path) else "file",
        bytes=_bytes(path),
        fault=fault,
        checkpoint=record,
    )


def _foreign(path: Path) -> str:
    """What a checkpoint names that would have to be run, which no checksum tells; empty where it names nothing of the kind."""
    for file in sorted(path.glob("rank-*.pt")) if os.path.isdir(path) else [path]:
        name = foreign_name(file)
        if name:
            return f"{file} is never loaded, whatever its checksums say: its structure names {plain(name)}, where plain values stand alone."
    return ""


def places_of(path: Path) -> list[Path]:
    """The checkpoints that a path stands for: itself, or those in it where it is a folder of checkpoints, the newest first.

    Args:
        path: What was named.

    Raises:
        CheckpointError: There is nothing, or it cannot be read, or it is a file of something else.
        ConfigurationError: It is a folder without checkpoints.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> for name in ("step-00000100.pt", "step-00000200.pt"):
        ...     (folder / name).touch()
        >>> [place.name for place in places_of(folder)]
        ['step-00000200.pt', 'step-00000100.pt']
    """
    if not os.path.isdir(path):
        kind = foreign_kind(path)
        if kind:
            raise CheckpointError(f"{path} is no checkpoint of halfstep, but {kind}.")
        return [path]
    if os.path.lexists(path / FOLDER_FILE):
        with suppress(DamagedCheckpointError), opened(path / FOLDER_FILE):
            return [path]
    if step_of(Path(os.path.realpath(path)).name) is not None:
        return [path]
    found = [place for _, place in checkpoints_in(path)]
    if not found:
        raise ConfigurationError(
            f"There is no checkpoint in {path}. A checkpoint is a file such as step-00000100.pt, or a folder with a {FOLDER_FILE}."
        )
    return found


def _bytes(path: Path) -> int:
    """What it takes up; files that are gone or cannot be looked at count nothing."""
    total = 0
    with suppress(OSError):
        for file in path.iterdir() if path.is_dir() else [path]:
            with suppress(OSError):
                total += file.stat().st_size
    return total
