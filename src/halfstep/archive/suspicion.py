"""Which part of a frame is not what was sealed, where its digest only says that one is not."""

from __future__ import annotations

import struct
import zlib
from io import FileIO
from pathlib import Path
from typing import Final

from halfstep.archive.frames import MANIFEST, Frame, Payload
from halfstep.archive.opening import read_at
from halfstep.archive.wording import plain

__all__ = ["suspect"]

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_SIZES_FOLLOW: Final = 0x0008


def suspect(file: FileIO, path: Path, frame: Frame) -> str:
    """What is wrong with a frame whose digest is another, as exactly as can be said.

    Args:
        file: The archive.
        path: What it is called in an error.
        frame: Its frame.

    Returns:
        A sentence without its full stop.
    """
    manifest = frame.manifest
    if manifest is not None and zlib.crc32(read_at(file, path, offset=manifest.offset, length=manifest.length)) != manifest.crc32:
        return f"what it says about itself ({MANIFEST}) is not what was saved"
    before: Payload | None = None
    for payload in frame.payloads:
        begin = before.end if before is not None else 0
        between = read_at(file, path, offset=begin, length=payload.offset - begin)
        sizes, header = between[: payload.header - begin], between[payload.header - begin :]
        if before is not None and sizes not in _sizes(before):
            return f"the sizes behind its record {plain(before.name)} are not what was saved"
        if payload is not manifest and not _is_as_written(header, payload, prefix=frame.prefix):
            return f"the header of its record {plain(payload.name)} is not what was saved"
        before = payload
    return "its table of contents is not what was saved"


def _sizes(payload: Payload) -> tuple[bytes, ...]:
    """What torch writes behind the data of a record: nothing, or its sizes, in four or in eight bytes each."""
    if not payload.flags & _SIZES_FOLLOW:
        return (b"",)
    begin = b"PK\x07\x08\0\0\0\0"
    return tuple(begin + 2 * payload.length.to_bytes(width, "little") for width in (4, 8) if payload.length < 1 << 8 * width)


def _is_as_written(header: bytes, payload: Payload, *, prefix: str) -> bool:
    """Whether a header is one that torch writes, with its padding."""
    name = (prefix + payload.name).encode()
    extra = header[_LOCAL.size + len(name) :]
    padding = len(extra) - len(extra.rstrip(b"Z"))
    expected = _LOCAL.pack(b"PK\x03\x04", 0, payload.flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return header.startswith(expected + name) and extra.endswith(b"FB" + padding.to_bytes(2, "little") + b"Z" * padding)
