"""Checksums of stretches of a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import Final

from halfstep.archive.opening import opened, size_of
from halfstep.archive.threads import together
from halfstep.archive.wording import cut_short

__all__ = ["checksum", "checksums"]

# Measured: larger ones fall out of the processor's cache between reading and summing up.
_CHUNK: Final = 1 << 20
# So much is handed to a thread at a time, and less is not worth a second one.
_BATCH: Final = 4 << 20


def checksum(path: Path, *, offset: int = 0, length: int | None = None) -> int:
    """The CRC-32 of a stretch of a file.

    Args:
        path: The file.
        offset: Where the stretch begins.
        length: How many bytes it has; `None` for all up to the end.

    Raises:
        CheckpointError: The file cannot be read.
        DamagedCheckpointError: It ends before the stretch does.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp(), "digits")
        >>> _ = file.write_bytes(b"123456789")
        >>> hex(checksum(file))
        '0xcbf43926'
    """
    if length is None:
        with opened(path) as file:
            length = max(size_of(file) - offset, 0)
    return checksums(path, [(offset, length)])[0]


def checksums(path: Path, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The CRC-32 of each of several stretches of a file, by two threads where there is much to read.

    Args:
        path: The file.
        spans: Where each stretch begins and how many bytes it has, in the order in which they lie in the file.

    Raises:
        CheckpointError: The file cannot be read.
        DamagedCheckpointError: It ends before a stretch does.
    """
    sums = [0] * len(spans)
    batches, lock, stopped = _batches(spans), Lock(), Event()

    def take() -> range | None:
        with lock:
            return next(batches, None)

    def run() -> None:
        try:
            with opened(path) as file:
                buffer = memoryview(bytearray(_CHUNK))
                while not stopped.is_set() and (batch := take()) is not None:
                    for place in batch:
                        sums[place] = _checksum(file, path, span=spans[place], buffer=buffer, stopped=stopped)
        except BaseException:
            stopped.set()
            raise

    threads = 2 if sum(length for _, length in spans) > _BATCH else 1
    together(*[run] * threads)
    return sums


def _batches(spans: Sequence[tuple[int, int]]) -> Iterator[range]:
    """The places of stretches that are read by one thread, one after the other."""
    first = amount = 0
    for place, (_, length) in enumerate(spans):
        amount += length
        if amount >= _BATCH:
            yield range(first, place + 1)
            first, amount = place + 1, 0
    yield range(first, len(spans))


def _checksum(file: FileIO, path: Path, *, span: tuple[int, int], buffer: memoryview, stopped: Event) -> int:
    offset, left = span
    total = 0
    file.seek(offset)
    while left and not stopped.is_set():
        count = file.readinto(buffer[: min(left, _CHUNK)])
        if not count:
            raise cut_short(path, f"it ends {left} bytes before the end of something in it")
        total = zlib.crc32(buffer[:count], total)
        left -= count
    return total
