"""The frame of a file: where the records of a zip archive lie in it, and every byte around them.

What is read here is not trusted. An archive that torch or halfstep wrote is read; what departs from that is damaged. Format:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, final

from halfstep.archive.opening import read_at, size_of
from halfstep.archive.wording import cut_short, damaged, plain

__all__ = ["COMMENT", "DIGITS", "MANIFEST", "Frame", "Payload", "frame_digest", "read_frame"]

# What the comment of a sealed archive is: this, and the digest of its frame.
COMMENT: Final = b"halfstep:"
DIGITS: Final = 64
# The record that says what a checkpoint holds.
MANIFEST: Final = "halfstep.json"

_END: Final = struct.Struct("<4s4H2LH")
_LOCATOR64: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")

_MARK32: Final = 0xFFFFFFFF
# The bits for sizes that follow the data, and for names in UTF-8.
_FLAGS: Final = 0x0808

# Far more than any model's: what claims more would fill the memory.
_LARGEST_DIRECTORY: Final = 256 << 20
# The sizes after one record, and the header of the next with a name and padding: no more can lie between the two.
_LARGEST_GAP: Final = 24 + _LOCAL.size + 2 * 0xFFFF

_DIRECTORY: Final = "its table of contents is not what was saved"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A record of an archive.

    Attributes:
        name: Its name, without what the names of all records begin with.
        header: Where its header begins.
        offset: Where its data begin.
        length: How many bytes those have.
        crc32: Their checksum, as the table of contents has it.
        flags: Bits that say how it was written.
    """

    name: str
    header: int
    offset: int
    length: int
    crc32: int
    flags: int

    @property
    def end(self) -> int:
        """Where the next byte after its data is."""
        return self.offset + self.length


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where everything lies in an archive.

    Attributes:
        size: How many bytes the file has.
        prefix: What the names of all records begin with, with the slash.
        payloads: The records, in the order of their data.
        directory: Where the table of contents begins.
    """

    size: int
    prefix: str
    payloads: tuple[Payload, ...]
    directory: int

    @property
    def manifest(self) -> Payload | None:
        """The record that says what the checkpoint holds."""
        return next((payload for payload in reversed(self.payloads) if payload.name == MANIFEST), None)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Where each stretch of the frame begins and ends: all but the data of records other than the manifest, and the digits."""
        begin = 0
        for payload in self.payloads:
            if payload.name != MANIFEST:
                yield begin, payload.offset
                begin = payload.end
        yield begin, self.size - DIGITS


def read_frame(file: FileIO, path: Path, *, sealed: bool) -> Frame:
    """Where the records of an archive lie.

    Args:
        file: The archive.
        path: What it is called in an error.
        sealed: Whether it has the comment of a sealed one, or none.

    Raises:
        DamagedCheckpointError: It is no such archive.
    """
    size = size_of(file)
    begin, end, count = _directory(file, path, size=size, comment=len(COMMENT) + DIGITS if sealed else 0)
    if end - begin > _LARGEST_DIRECTORY or count * _ENTRY.size > end - begin:
        raise damaged(path, _DIRECTORY)
    entries = [*_entries(path, read_at(file, path, offset=begin, length=end - begin), count=count)]
    prefix = _prefix(path, [entry.name for entry in entries])
    payloads = []
    last = 0
    for entry in sorted(entries, key=lambda one: one.header):
        if entry.header + _LOCAL.size + entry.length > begin:
            raise damaged(path, _DIRECTORY)
        payload = _located(file, path, entry, prefix=prefix)
        if payload.header < last or payload.offset - last > _LARGEST_GAP or payload.end > begin:
            raise damaged(path, f"the header of its record {plain(payload.name)} is not what was saved")
        last = payload.end
        payloads.append(payload)
    if begin - last > _LARGEST_GAP:
        raise damaged(path, _DIRECTORY)
    return Frame(size=size, prefix=prefix, payloads=tuple(payloads), directory=begin)


def frame_digest(file: FileIO, path: Path, frame: Frame) -> str:
    """The SHA-256 of a frame, in hexadecimal digits."""
    digest = hashlib.sha256()
    for begin, end in frame.gaps():
        digest.update(read_at(file, path, offset=begin, length=end - begin))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line of the table of contents."""

    name: str
    flags: int
    header: int
    length: int
    crc32: int


def _directory(file: FileIO, path: Path, *, size: int, comment: int) -> tuple[int, int, int]:
    """Where the table of contents begins and ends, and how many records it lists."""
    place = size - _END.size - comment
    if place < 0:
        raise cut_short(path)
    mark, disk, first_disk, here, count, length, offset, said = _END.unpack(read_at(file, path, offset=place, length=_END.size))
    if mark != b"PK\x05\x06" or said != comment:
        raise cut_short(path) if mark != b"PK\x05\x06" else damaged(path, "its end record is not what was saved")
    end = place
    if place >= _LOCATOR64.size + _END64.size:
        mark, _, where, _ = _LOCATOR64.unpack(read_at(file, path, offset=place - _LOCATOR64.size, length=_LOCATOR64.size))
        if mark == b"PK\x06\x07":
            end = place - _LOCATOR64.size - _END64.size
            mark64, *_, here, count, length, offset = _END64.unpack(read_at(file, path, offset=end, length=_END64.size))
            if where != end or mark64 != b"PK\x06\x06":
                raise damaged(path, "its end record is not what was saved")
    if disk or first_disk or here != count or offset + length != end:
        raise damaged(path, "its end record is not what was saved")
    return offset, end, count


def _entries(path: Path, directory: bytes, *, count: int) -> Iterator[_Entry]:
    """The lines of the table of contents."""
    place = 0
    for _ in range(count):
        if place + _ENTRY.size > len(directory):
            raise damaged(path, _DIRECTORY)
        fields = _ENTRY.unpack_from(directory, place)
        mark, _, _, flags, method, _, _, crc32, packed, length, names, extras, comments, disk, _, _, header = fields
        name = directory[place + _ENTRY.size : place + _ENTRY.size + names]
        place += _ENTRY.size + names
        extra = directory[place : place + extras]
        place += extras
        if mark != b"PK\x01\x02" or flags & ~_FLAGS or method or comments or disk or place > len(directory):
            raise damaged(path, _DIRECTORY)
        length, packed, header = _wide(path, extra, [length, packed, header])
        if packed != length:
            raise damaged(path, _DIRECTORY)
        yield _Entry(name=_decoded(path, name), flags=flags, header=header, length=length, crc32=crc32)
    if place != len(directory):
        raise damaged(path, _DIRECTORY)


def _wide(path: Path, extra: bytes, numbers: list[int]) -> list[int]:
    """Sizes and an offset, those that need 64 bits from the extra field that holds them."""
    needed = sum(number == _MARK32 for number in numbers)
    if not needed:
        return numbers
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1 and length >= 8 * needed and len(extra) >= 4 + 8 * needed:
            wide = iter(struct.unpack_from(f"<{needed}Q", extra, 4))
            return [next(wide) if number == _MARK32 else number for number in numbers]
        extra = extra[4 + length :]
    raise damaged(path, _DIRECTORY)


def _decoded(path: Path, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, _DIRECTORY) from error


def _prefix(path: Path, names: list[str]) -> str:
    """What all names begin with: the name of the first record up to its first slash."""
    prefix = "".join(names[0].partition("/")[:2]) if names else ""
    is_whole = len(prefix) > 1 and len({*names}) == len(names)
    if not is_whole or not all(name.startswith(prefix) and not name.endswith("/") and "\0" not in name for name in names):
        raise damaged(path, _DIRECTORY)
    return prefix


def _located(file: FileIO, path: Path, entry: _Entry, *, prefix: str) -> Payload:
    """The record that a line of the table of contents is about; its header says where the data begin."""
    name = entry.name.encode()
    header = read_at(file, path, offset=entry.header, length=_LOCAL.size + len(name))
    mark, _, flags, method, _, _, _, _, _, names, extras = _LOCAL.unpack_from(header)
    if mark != b"PK\x03\x04" or flags != entry.flags or method or names != len(name) or header[_LOCAL.size :] != name:
        raise damaged(path, f"the header of its record {plain(entry.name.removeprefix(prefix))} is not what was saved")
    return Payload(
        name=entry.name.removeprefix(prefix),
        header=entry.header,
        offset=entry.header + _LOCAL.size + len(name) + extras,
        length=entry.length,
        crc32=entry.crc32,
        flags=entry.flags,
    )
