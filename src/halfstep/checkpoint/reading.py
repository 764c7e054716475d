"""A checkpoint read back: verified whole first, and then without running any code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from halfstep.archive import verify
from halfstep.checkpoint.contents import FORMAT
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import CheckpointRecord

__all__ = ["Loaded", "read_file", "read_tree"]

# How often a file is read that others replace meanwhile.
_ATTEMPTS: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no single truth value to compare by
class Loaded:
    """What a checkpoint holds for this process, not yet in the run.

    Attributes:
        path: Where it was read.
        record: What it says about itself.
        tree: Its parts; tensors lie in the file until they are copied.
        is_same: Whether as many processes saved it as load it.
        has_own: Whether a process saved it that had this one's place; otherwise what a process saves for itself is that of the first.
    """

    path: Path
    record: CheckpointRecord
    tree: dict[str, Any]
    is_same: bool
    has_own: bool


def read_file(path: Path, *, rank: int = 0, ranks: int = 1) -> Loaded:
    """What one process saved.

    Args:
        path: The file.
        rank: Of this process among those that load it.
        ranks: How many those are.

    Raises:
        DamagedCheckpointError: It is no checkpoint, or not as it was saved.
        CheckpointError: It is not there, or may not be read.
    """
    for attempt in range(_ATTEMPTS):
        before = _identity(path)
        try:
            record = verify(path)
            tree = read_tree(path, record=record)
        except DamagedCheckpointError:
            if _identity(path) == before or attempt == _ATTEMPTS - 1:
                raise
        else:
            if _identity(path) == before:
                return Loaded(path=path, record=record, tree=tree, is_same=ranks == 1, has_own=rank == 0)
    raise CheckpointError(f"{path} was replaced by another process each time that it was read. Load it when nobody saves to it.")


def _identity(path: Path) -> tuple[int, ...]:
    """Which file it is that has a name now: it may be replaced, as a whole, while it is read."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_tree(path: Path, *, record: CheckpointRecord) -> dict[str, Any]:
    """The parts in a file that was verified; its tensors lie in the file until they are copied.

    Raises:
        DamagedCheckpointError: It holds something else than plain values and tensors, and none of it was run; or it lacks a part.
    """
    try:
        tree: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # Whatever a file makes of torch's reader.
        raise DamagedCheckpointError(
            f"{path} is refused: besides plain values and tensors it holds something that would have to be run to be read, or that cannot "
            "be read at all. Nothing in it was run. halfstep writes no such files."
        ) from error
    written = tree.get("format") if isinstance(tree, Mapping) else None
    if written != FORMAT or not isinstance(tree, dict):
        raise DamagedCheckpointError(
            f"{path} is no checkpoint of halfstep inside: it should begin with {FORMAT!r}, and begins with {written!r}."
        )
    names = [part.name for part in record.parts]
    if missing := [name for name in (*names, "step", "random", "extra") if name not in tree]:
        raise DamagedCheckpointError(f"{path} is damaged: its part {missing[0]!r} is missing.")
    if not isinstance(tree["step"], int) or tree["step"] != record.step:
        raise DamagedCheckpointError(f"{path} is damaged: it says of itself that it is of step {record.step}, and holds {tree['step']!r}.")
    return tree
