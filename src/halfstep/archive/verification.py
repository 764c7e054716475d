"""Whether a checkpoint is what was saved, byte for byte."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from halfstep.archive.checksums import checksums
from halfstep.archive.folders import read_folder, refuse_other_sizes, verify_stretches
from halfstep.archive.frames import COMMENT, DIGITS, MANIFEST, Frame, Payload, frame_digest, read_frame
from halfstep.archive.manifests import LARGEST_MANIFEST, decode_manifest
from halfstep.archive.opening import opened, read_at
from halfstep.archive.recognition import refuse_foreign
from halfstep.archive.suspicion import suspect
from halfstep.archive.wording import damaged, others_text, part_text, plain
from halfstep.records import CheckpointRecord

__all__ = ["read_record", "verify"]


def verify(path: Path) -> CheckpointRecord:
    """Reads a whole checkpoint and makes sure that each of its bytes is what was saved. Nothing in it is loaded or executed.

    Args:
        path: The checkpoint, a file or a folder.

    Returns:
        What it says about itself.

    Raises:
        CheckpointError: It is not there, or cannot be read.
        DamagedCheckpointError: It is no checkpoint of halfstep, or a byte of it is another; the message names the part.

    Example:
        >>> verify(Path("no/such/step-00000100.pt"))
        Traceback (most recent call last):
        ...
        halfstep.errors.CheckpointError: There is no checkpoint at no/such/step-00000100.pt.
    """
    if os.path.isdir(path):
        folder = read_folder(path)
        refuse_other_sizes(path, folder)
        verify_stretches(path, folder.files)
        return folder.checkpoint
    with opened(path) as file:
        before = os.fstat(file.fileno())
        frame, record = _read(file, path)
        wrong = _wrong_payloads(path, frame)
    _refuse_changed(path, before)
    if wrong:
        raise damaged(path, f"{part_text(wrong[0].name, record.tensors)} is not what was saved{others_text(len(wrong) - 1)}")
    return record


def read_record(path: Path) -> CheckpointRecord:
    """What a checkpoint says about itself, without reading the tensors in it: that these are what was saved, only `verify` knows.

    Of a file, all but the data is verified; of a folder, its `checkpoint.json`, and that every file is there and has its size.

    Args:
        path: The checkpoint, a file or a folder.

    Raises:
        CheckpointError: It is not there, or cannot be read.
        DamagedCheckpointError: It is no checkpoint of halfstep, or something but its data is not what was saved.

    Example:
        >>> read_record(Path("no/such/step-00000100.pt"))
        Traceback (most recent call last):
        ...
        halfstep.errors.CheckpointError: There is no checkpoint at no/such/step-00000100.pt.
    """
    if os.path.isdir(path):
        folder = read_folder(path)
        refuse_other_sizes(path, folder)
        return folder.checkpoint
    with opened(path) as file:
        return _read(file, path)[1]


def _read(file: FileIO, path: Path) -> tuple[Frame, CheckpointRecord]:
    """The frame, which is what was sealed, and what the checkpoint says about itself."""
    refuse_foreign(file, path)
    frame = read_frame(file, path, sealed=True)
    manifest = frame.manifest
    if manifest is None or manifest.length > LARGEST_MANIFEST:
        raise damaged(path, f"its record {MANIFEST} is not what was saved")
    comment = read_at(file, path, offset=frame.size - DIGITS - len(COMMENT), length=len(COMMENT) + DIGITS)
    if comment != COMMENT + frame_digest(file, path, frame).encode():
        raise damaged(path, suspect(file, path, frame))
    record = decode_manifest(read_at(file, path, offset=manifest.offset, length=manifest.length), path, CheckpointRecord)
    _refuse_missing(path, frame, record)
    return frame, record


def _refuse_missing(path: Path, frame: Frame, record: CheckpointRecord) -> None:
    """Makes sure that what a checkpoint says of its tensors can be: the records that hold them are there."""
    names = {payload.name for payload in frame.payloads}
    for tensor in record.tensors:
        for storage in tensor.storage.split(","):
            if storage and storage not in names:
                raise damaged(path, f"it lacks the data of {plain(tensor.name)} ({plain(storage)})")


def _wrong_payloads(path: Path, frame: Frame) -> list[Payload]:
    """The records whose data have another checksum than the table of contents says."""
    sums = checksums(path, [(payload.offset, payload.length) for payload in frame.payloads])
    return [payload for payload, found in zip(frame.payloads, sums, strict=True) if found != payload.crc32]


def _refuse_changed(path: Path, before: os.stat_result) -> None:
    """Makes sure that a file is the one that it was: a run that goes on may have saved another one in its place."""
    with opened(path) as file:
        now = os.fstat(file.fileno())
    if any(getattr(now, name) != getattr(before, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns")):
        raise damaged(path, "it was replaced or written to while it was read")
