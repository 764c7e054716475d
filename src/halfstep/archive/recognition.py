"""What a file is that is no checkpoint of halfstep."""

from __future__ import annotations

import re
from io import FileIO
from pathlib import Path
from typing import Final

from halfstep.archive.frames import COMMENT, DIGITS, MANIFEST
from halfstep.archive.opening import opened, read_at, size_of
from halfstep.archive.wording import cut_short, damaged
from halfstep.errors import DamagedCheckpointError

__all__ = ["foreign_kind", "refuse_foreign"]

# So far from its end the end record of an archive may lie, and so much of a file is looked at.
_TAIL: Final = 22 + 0xFFFF
_TABLE: Final = 1 << 20

_TORCH: Final = "a file that torch.save wrote. Its scaler can be read with halfstep.import_scaler_state"
_ZIP: Final = b"PK\x03\x04"
_END: Final = b"PK\x05\x06"
_SEAL: Final = re.compile(b"%b[0-9a-f]{%d}" % (COMMENT, DIGITS))

# What the records of an archive tell, the most telling ones first.
_MEMBERS: Final = (
    (b"/constants.pkl", "a TorchScript program"),
    (b"/archive_format", "a program that torch.export wrote"),
    (b"/data.pkl", _TORCH),
    (b".npy", "an archive of NumPy"),
)
_BEGINNINGS: Final = (
    (re.compile(rb"\x80[\x02-\x05]\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"), f"{_TORCH}, in its format before version 1.6"),
    (re.compile(rb".{7}\x00\{"), "a file of safetensors"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"\x93NUMPY"), "an array of NumPy"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "a file of HDF5"),
    (re.compile(rb"GGUF"), "a file of GGUF"),
    (re.compile(rb"\x1f\x8b"), "compressed with gzip"),
    (re.compile(rb"(?s:.{257})ustar"), "a tar archive"),
)


def foreign_kind(path: Path) -> str:
    """What a file is that has no trace of halfstep; empty where it may be a checkpoint of halfstep, if a damaged one.

    Args:
        path: The file.

    Raises:
        CheckpointError: It cannot be read.
        DamagedCheckpointError: It is no file.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp(), "notes.txt")
        >>> _ = file.write_text("It went well.")
        >>> foreign_kind(file)
        'text'
    """
    with opened(path) as file:
        return _kind(file, path)


def refuse_foreign(file: FileIO, path: Path) -> None:
    """Makes sure that a file may be a checkpoint of halfstep.

    Raises:
        DamagedCheckpointError: It has no trace of it; the message names what it is.
    """
    kind = _kind(file, path)
    if kind:
        raise DamagedCheckpointError(f"{path} is no checkpoint of halfstep, but {kind}.")
    size = size_of(file)
    if not size:
        raise damaged(path, "it is empty")
    head = read_at(file, path, offset=0, length=min(size, 4096))
    if not any(head):
        raise damaged(path, "it begins with zeros, as a file does that was not yet on disk when the machine failed")
    tail = _tail(file, path, size)
    if _END not in tail:
        raise cut_short(path)
    more = min((len(tail) - seal.end() for seal in _SEAL.finditer(tail)), default=0)
    if more:
        raise damaged(path, f"there {'is 1 byte' if more == 1 else f'are {more:,} bytes'} behind its end record")


def _kind(file: FileIO, path: Path) -> str:
    size = size_of(file)
    head = read_at(file, path, offset=0, length=min(size, 4096))
    tail = _tail(file, path, size)
    if not any(head) or _SEAL.search(tail) or f"/{MANIFEST}".encode() in tail:
        return ""
    if head[:4] == _ZIP[: len(head)]:
        return _archive_kind(file, path, tail)
    known = next((kind for beginning, kind in _BEGINNINGS if beginning.match(head)), "")
    return known or ("text" if _is_text(head) else "something else")


def _tail(file: FileIO, path: Path, size: int) -> bytes:
    length = min(size, _TAIL)
    return read_at(file, path, offset=size - length, length=length)


def _archive_kind(file: FileIO, path: Path, tail: bytes) -> str:
    """What sort of zip archive it is; empty where its end is missing, so that it may have been ours."""
    end = tail.rfind(_END)
    if end < 0 or len(tail) < end + 22:
        return ""
    length = min(int.from_bytes(tail[end + 12 : end + 16], "little"), _TABLE)
    offset = int.from_bytes(tail[end + 16 : end + 20], "little")
    table = tail[:end]
    if offset + length <= size_of(file):
        table += read_at(file, path, offset=offset, length=length)
    return next((kind for member, kind in _MEMBERS if member in table), "a zip archive")


def _is_text(head: bytes) -> bool:
    # A letter may be cut at the end.
    text = head.decode(errors="ignore")
    return len(text.encode()) > len(head) - 4 and all(letter.isprintable() or letter.isspace() for letter in text)
