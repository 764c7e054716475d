"""How it is said that a checkpoint cannot be read or written, and what is wrong with it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import TensorRecord

__all__ = ["bytes_text", "cut_short", "damaged", "others_text", "part_text", "plain", "tensor_text", "unreadable", "unwritable"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")

# So long a name is shown whole.
_LONGEST: Final = 200


def plain(name: str) -> str:
    r"""A name that was read from a file, in one line that changes nothing on a terminal.

    Example:
        >>> plain("layer\x1b[31m.weight")
        'layer\\x1b[31m.weight'
    """
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in shown)


def bytes_text(count: int) -> str:
    """A number of bytes as people read it.

    Example:
        >>> bytes_text(1), bytes_text(900), bytes_text(1536), bytes_text(3 * 1024**3)
        ('1 byte', '900 bytes', '1.5 KiB', '3.0 GiB')
    """
    if count == 1:
        return "1 byte"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def damaged(path: Path, what: str) -> DamagedCheckpointError:
    """The error for a checkpoint of which something is wrong.

    Args:
        path: The checkpoint.
        what: What is wrong with it, as a sentence without its full stop.

    Example:
        >>> str(damaged(Path("step-00000100.pt"), "its table of contents is not what was saved"))
        'step-00000100.pt is damaged: its table of contents is not what was saved.'
    """
    return DamagedCheckpointError(f"{path} is damaged: {what}.")


def cut_short(path: Path, why: str = "it has no end record") -> DamagedCheckpointError:
    """The error for a checkpoint whose end is missing.

    Example:
        >>> str(cut_short(Path("step-00000100.pt")))
        'step-00000100.pt is cut short: it has no end record.'
    """
    return DamagedCheckpointError(f"{path} is cut short: {why}.")


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """The error for what is not there, or may not be read.

    Example:
        >>> str(unreadable(Path("step-00000100.pt"), PermissionError(13, "Permission denied")))
        'Cannot read step-00000100.pt: Permission denied.'
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CheckpointError(f"There is no checkpoint at {path}.")
    return CheckpointError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.")


def unwritable(path: Path, error: OSError, *, needed: int | None = None) -> CheckpointError:
    """The error for a checkpoint that cannot be written.

    Args:
        path: The checkpoint.
        error: What the system says.
        needed: How many bytes it takes in all; `None` where that is not known.

    Example:
        >>> str(unwritable(Path("runs/step-00000100.pt"), PermissionError(13, "Permission denied")))
        'Cannot write runs/step-00000100.pt: Permission denied. Older checkpoints are untouched.'
    """
    if error.errno not in _FULL:
        return CheckpointError(f"Cannot write {path}: {error.strerror or error}. Older checkpoints are untouched.")
    amounts = " and ".join(filter(None, (f"{bytes_text(needed)} are needed" if needed is not None else "", _free_text(path))))
    return CheckpointError(
        f"Cannot write {path}: the disk is full{f' ({amounts})' if amounts else ''}. Older checkpoints are untouched. Free some space, "
        "or keep fewer checkpoints."
    )


def _free_text(path: Path) -> str:
    try:
        return f"{bytes_text(shutil.disk_usage(path.parent).free)} are free"
    except OSError:
        return ""


def tensor_text(names: Sequence[str]) -> str:
    """The names of tensors that share their data.

    Example:
        >>> tensor_text(["model.embedding.weight"]), tensor_text(["model.embedding.weight", "model.head.weight", "extra.0"])
        ('model.embedding.weight', 'model.embedding.weight and 2 more')
    """
    return f"{plain(names[0])} and {len(names) - 1} more" if len(names) > 1 else plain(names[0])


def others_text(count: int) -> str:
    """What follows the one part that is named where others are wrong as well; nothing where none is.

    Example:
        >>> others_text(0), others_text(1), others_text(3)
        ('', ', nor is another part', ', nor are 3 other parts')
    """
    return f", nor are {count} other parts" if count > 1 else ", nor is another part" if count else ""


def part_text(name: str, tensors: Sequence[TensorRecord]) -> str:
    """What a record of a file holds, in the words of whoever saved it.

    Args:
        name: The record, such as `data/17`.
        tensors: The tensors in the file.

    Example:
        >>> weight = TensorRecord(name="model.layer1.weight", dtype="float32", shape=(2, 2), storage="data/17")
        >>> part_text("data/17", [weight]), part_text("data.pkl", [weight]), part_text("version", [])
        ('the data of model.layer1.weight (data/17)', 'the structure (data.pkl)', 'its record version')
    """
    if name == "data.pkl":
        return "the structure (data.pkl)"
    names = [tensor.name for tensor in tensors if name in tensor.storage.split(",")]
    return f"the data of {tensor_text(names)} ({plain(name)})" if names else f"its record {plain(name)}"
