"""What a checkpoint says about itself, as it is written into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

from halfstep.archive.wording import damaged
from halfstep.errors import DamagedCheckpointError, RecordFormatError
from halfstep.records import CHECKPOINT_SCHEMA, CheckpointRecord, FolderRecord
from halfstep.records.codec import parse, structure

__all__ = ["LARGEST_MANIFEST", "decode_manifest"]

_Manifest = TypeVar("_Manifest", CheckpointRecord, FolderRecord)

# That of a model of 100,000 tensors has some 20 MiB. What claims more than this would fill the memory.
LARGEST_MANIFEST: Final = 256 << 20


def decode_manifest(text: bytes, path: Path, cls: type[_Manifest]) -> _Manifest:
    """The record that the JSON in a checkpoint holds.

    Args:
        text: The JSON.
        path: The checkpoint, for the message.
        cls: What it should hold.

    Raises:
        DamagedCheckpointError: It is something else, or a newer halfstep wrote it.

    Example:
        >>> decode_manifest(b'{"schema": 99}', Path("step-00000100.pt"), CheckpointRecord)
        Traceback (most recent call last):
        ...
        halfstep.errors.DamagedCheckpointError: step-00000100.pt was written by a newer halfstep: its format has the number 99, and this
        one reads up to 1. Upgrade halfstep.
    """
    try:
        plain = parse(text, cls)
        _refuse_newer(plain, path)
        record = structure(plain, cls)
    except RecordFormatError as error:
        raise damaged(path, f"what it says about itself cannot be read ({str(error).rstrip('.')})") from error
    if record.schema < 1:
        raise damaged(path, f"the number of its format is {record.schema}")
    return record


def _refuse_newer(plain: Any, path: Path) -> None:
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if isinstance(schema, int) and schema > CHECKPOINT_SCHEMA:
        raise DamagedCheckpointError(
            f"{path} was written by a newer halfstep: its format has the number {schema}, and this one reads up to {CHECKPOINT_SCHEMA}. "
            "Upgrade halfstep."
        )
