"""Sealing a file that torch wrote: checksums over its data, a digest over the rest, and all of it on disk."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Final

from halfstep.archive.checksums import checksums
from halfstep.archive.frames import COMMENT, DIGITS, MANIFEST, Frame, frame_digest, read_frame
from halfstep.archive.manifests import LARGEST_MANIFEST
from halfstep.archive.threads import together
from halfstep.archive.wording import bytes_text, unwritable
from halfstep.errors import CheckpointError, DamagedCheckpointError
from halfstep.records import CheckpointRecord

__all__ = ["seal"]

# macOS and Windows have only the one that writes times and such as well.
_flush_data: Final = getattr(os, "fdatasync", os.fsync)


def seal(path: Path, record: CheckpointRecord, *, sums: Mapping[str, int] | None = None) -> None:
    """Makes a file that `torch.save` wrote into a checkpoint, in place: `verify` then finds any byte that changes, and names it.

    The file stays one that torch reads. All of it is on disk when this returns. Where it raises, the file is no checkpoint and of no use.

    Args:
        path: The file. It may have been written without checksums.
        record: What it holds.
        sums: The CRC-32 of what is in some of its records, by their names, such as `data/0`, where that is known; the others are read.

    Raises:
        CheckpointError: It cannot be written, as the disk is full, say, or is no file that `torch.save` wrote.

    Example:
        >>> import torch
        >>> from tempfile import mkdtemp
        >>> from halfstep.archive import verify
        >>> path = Path(mkdtemp(), "step-00000100.pt")
        >>> torch.save({"weight": torch.ones(2)}, path)
        >>> seal(path, CheckpointRecord(step=100, time="2026-01-31T12:00:00+00:00", halfstep="0.1.0", torch="2.13.0", python="3.11.2",
        ...     device="cpu", ranks=1, rank=0, engines=(), parts=(), tensors=()))
        >>> verify(path).step, torch.load(path, weights_only=True)["weight"].sum()
        (100, tensor(2.))
    """
    manifest = record.to_json().encode()
    if len(manifest) > LARGEST_MANIFEST:
        raise CheckpointError(
            f"Cannot write {path}: the names of its {len(record.tensors)} tensors take {bytes_text(len(manifest))}, and up to "
            f"{bytes_text(LARGEST_MANIFEST)} are allowed. Keep fewer tensors in it."
        )
    try:
        with path.open("r+b", buffering=0) as file:
            _seal(file, path, manifest, known=sums or {})
    except OSError as error:
        raise unwritable(path, error, needed=_size(path) + len(manifest)) from error


def _seal(file: FileIO, path: Path, manifest: bytes, *, known: Mapping[str, int]) -> None:
    frame = _written_by_torch(file, path)
    if frame.manifest is not None:
        raise CheckpointError(f"Cannot seal {path}: it has a record {MANIFEST} already.")
    sums = {payload.header: known[payload.name] for payload in frame.payloads if payload.name in known}
    others = [payload for payload in frame.payloads if payload.name not in known]

    def sum_up() -> None:
        found = checksums(path, [(payload.offset, payload.length) for payload in others])
        sums.update(zip((payload.header for payload in others), found, strict=True))

    # The disk is slower than the sums, so that these cost no time.
    together(sum_up, lambda: _flush_data(file.fileno()))
    _write_directory(path, frame, manifest, sums=sums)
    sealed = read_frame(file, path, sealed=True)
    file.seek(sealed.size - DIGITS)
    file.write(frame_digest(file, path, sealed).encode())
    os.fsync(file.fileno())


def _written_by_torch(file: FileIO, path: Path) -> Frame:
    """The frame of a file that is not sealed."""
    try:
        return read_frame(file, path, sealed=False)
    except DamagedCheckpointError as error:
        raise CheckpointError(f"Cannot seal {path}: it is sealed already, or no file that torch.save wrote as it stands.") from error


def _write_directory(path: Path, frame: Frame, manifest: bytes, *, sums: Mapping[int, int]) -> None:
    """Writes the manifest and a new table of contents over the one of torch."""
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as archive:
        for info in archive.infolist():
            info.CRC = sums[info.header_offset]
        # Its time is that of torch's records, so that the same state makes the same file.
        archive.writestr(zipfile.ZipInfo(frame.prefix + MANIFEST), manifest)
        archive.comment = COMMENT + b"0" * DIGITS


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
