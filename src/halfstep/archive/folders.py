"""Checkpoints that are folders: what `checkpoint.json` says, and whether the other files are what was saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import FileIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

from halfstep.archive.checksums import checksums
from halfstep.archive.manifests import LARGEST_MANIFEST, decode_manifest
from halfstep.archive.opening import opened, read_at, size_of
from halfstep.archive.wording import bytes_text, cut_short, damaged, others_text, plain, unwritable
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import FileRecord, FolderRecord

__all__ = ["FOLDER_FILE", "read_folder", "refuse_other_sizes", "verify_stretches", "write_folder_record"]

# The file in a folder that says what the folder holds.
FOLDER_FILE: Final = "checkpoint.json"
_DIGEST: Final = b"sha256:"


def write_folder_record(folder: Path, record: FolderRecord) -> None:
    """Writes `checkpoint.json`: what a folder holds, and a digest of that. It is on disk when this returns.

    Args:
        folder: The folder.
        record: What it holds.

    Raises:
        CheckpointError: It cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.records import CheckpointRecord
        >>> checkpoint = CheckpointRecord(step=100, time="2026-01-31T12:00:00+00:00", halfstep="0.1.0", torch="2.13.0", python="3.11.2",
        ...     device="cpu", ranks=2, rank=0, engines=(), parts=(), tensors=())
        >>> folder = Path(mkdtemp())
        >>> write_folder_record(folder, FolderRecord(checkpoint=checkpoint, files=()))
        >>> read_folder(folder).checkpoint == checkpoint
        True
    """
    path = folder / FOLDER_FILE
    text = record.to_json().encode()
    if len(text) > LARGEST_MANIFEST:
        raise CheckpointError(
            f"Cannot write {path}: the names of its {len(record.checkpoint.tensors)} tensors take {bytes_text(len(text))}, and up to "
            f"{bytes_text(LARGEST_MANIFEST)} are allowed. Keep fewer tensors in it."
        )
    try:
        with path.open("wb") as file:
            file.write(_signed(text))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error, needed=len(text)) from error


def read_folder(folder: Path) -> FolderRecord:
    """What `checkpoint.json` says a folder holds. It is verified itself; the other files are not looked at.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: It cannot be read.
        DamagedCheckpointError: There is none, or it is not what was saved.

    Example:
        >>> from tempfile import mkdtemp
        >>> read_folder(Path(mkdtemp()))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        halfstep.errors.DamagedCheckpointError: ... is no checkpoint of halfstep: it has no checkpoint.json.
    """
    path = folder / FOLDER_FILE
    if not os.path.lexists(path):
        raise DamagedCheckpointError(f"{folder} is no checkpoint of halfstep: it has no {FOLDER_FILE}{_likely(folder)}.")
    with opened(path) as file:
        size = size_of(file)
        if size > LARGEST_MANIFEST + 1024:
            raise damaged(folder, f"its {FOLDER_FILE} is not what was saved")
        content = read_at(file, path, offset=0, length=size)
    text, _, _ = content.partition(b"\n")
    if content != _signed(text):
        raise damaged(folder, f"its {FOLDER_FILE} is not what was saved" if content else f"its {FOLDER_FILE} is empty")
    record = decode_manifest(text, path, FolderRecord)
    for file_name, stretches in _by_file(record.files):
        _refuse_gaps(folder, file_name, stretches)
    return record


def _signed(text: bytes) -> bytes:
    return b"%b\n%b%b\n" % (text, _DIGEST, sha256(text).hexdigest().encode())


def _likely(folder: Path) -> str:
    """What a folder seems to be that is no checkpoint of halfstep."""
    return ". It seems to be one of torch.distributed.checkpoint alone" if os.path.lexists(folder / ".metadata") else ""


def _by_file(files: Sequence[FileRecord]) -> Iterator[tuple[str, list[FileRecord]]]:
    """The stretches of each file, in the order in which they lie in it."""
    for name, stretches in groupby(sorted(files, key=attrgetter("file", "offset")), key=attrgetter("file")):
        yield name, [*stretches]


def _refuse_gaps(folder: Path, name: str, stretches: Sequence[FileRecord]) -> None:
    # A name must not lead out of the folder.
    if name in {"", ".", "..", FOLDER_FILE} or {"/", "\\", "\0"} & {*name}:
        raise damaged(folder, f"its {FOLDER_FILE} names a file {plain(name)!r}, which cannot be in it")
    end = 0
    for stretch in stretches:
        if stretch.offset != end or stretch.length < 0:
            raise damaged(folder, f"its {FOLDER_FILE} does not tell what all bytes of {plain(name)} are")
        end += stretch.length


def refuse_other_sizes(folder: Path, record: FolderRecord) -> None:
    """Makes sure that each file of a folder is there, and has its size.

    Raises:
        CheckpointError: A file cannot be looked at.
        DamagedCheckpointError: One is missing, or has another size.
    """
    for name, stretches in _by_file(record.files):
        with _opened(folder, name) as file:
            size, saved = size_of(file), sum(stretch.length for stretch in stretches)
        if size < saved:
            raise cut_short(folder, f"its file {plain(name)} has {size:,} of {saved:,} bytes")
        if size > saved:
            raise damaged(folder, f"its file {plain(name)} has {size - saved:,} bytes more than were saved")


def verify_stretches(folder: Path, files: Sequence[FileRecord]) -> None:
    """Makes sure that stretches of the files in a folder are what was saved: all of them, or the share of one process.

    Args:
        folder: The folder.
        files: The stretches. That a file does not go on behind the last of them, `read_record` makes sure of.

    Raises:
        CheckpointError: A file cannot be read.
        DamagedCheckpointError: A stretch is not what was saved; the message names it.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> _ = (folder / "__0_0.distcp").write_bytes(b"123456789")
        >>> verify_stretches(folder, [FileRecord(file="__0_0.distcp", offset=0, length=9, crc32=0xCBF43926, name="model.weight")])
    """
    for name, stretches in _by_file(files):
        path = folder / name
        with _opened(folder, name) as file:
            size, saved = size_of(file), max(stretch.offset + stretch.length for stretch in stretches)
        if size < saved:
            raise cut_short(folder, f"its file {plain(name)} has {size:,} of {saved:,} bytes")
        sums = checksums(path, [(stretch.offset, stretch.length) for stretch in stretches])
        wrong = [stretch for stretch, found in zip(stretches, sums, strict=True) if found != stretch.crc32]
        if wrong:
            raise damaged(folder, f"{_stretch_text(wrong[0])} is not what was saved{others_text(len(wrong) - 1)}")


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[FileIO]:
    if not os.path.exists(folder / name):
        raise damaged(folder, f"its file {plain(name)} is missing")
    with opened(folder / name) as file:
        yield file


def _stretch_text(stretch: FileRecord) -> str:
    return f"the data of {plain(stretch.name)} (in {plain(stretch.file)})" if stretch.name else f"its file {plain(stretch.file)}"
