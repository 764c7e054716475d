"""The structure of what a file holds: a pickle, of which only the names are looked at."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Final

__all__ = ["foreign_name"]

# The names that torch uses for plain values and tensors, besides its own.
_PLAIN: Final = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "__builtin__.bytearray",
        "__builtin__.complex",
        "__builtin__.set",
        "collections.Counter",
        "collections.OrderedDict",
    }
)

# A longer one is that of no checkpoint, and takes a while to read.
_LONGEST: Final = 256 * 1024**2


def foreign_name(path: Path) -> str:
    r"""A name in the structure of a file that plain values and tensors have no need of, such as that of a function; empty without one.

    torch refuses to read such a file without running code, and halfstep writes none. Nothing in it is run.

    Args:
        path: A file that was verified.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "a.pt"
        >>> with zipfile.ZipFile(path, "w") as file:
        ...     file.writestr("archive/data.pkl", b"cposix\nsystem\n.")
        >>> foreign_name(path)
        'posix.system'
    """
    with zipfile.ZipFile(path) as file:
        entry = next((each for each in file.infolist() if each.filename.endswith("/data.pkl")), None)
        if entry is None or entry.file_size > _LONGEST:
            return "no structure that could be read"
        pickled = file.read(entry)
    try:
        for code, argument, _ in pickletools.genops(pickled):
            if code.name in ("GLOBAL", "INST"):
                name = str(argument).replace(" ", ".", 1)
                if not name.startswith("torch.") and name not in _PLAIN:
                    return name
            elif code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
                return "something by a name that is put together while it is read"
    except Exception as error:  # Whatever bytes make of the reader.
        return f"something that is no structure ({error})"
    return ""
