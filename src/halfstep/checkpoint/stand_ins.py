"""Reading what `torch.save` wrote without running any code for it: whatever is not plain data is replaced by something inert."""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep.errors import CheckpointError

__all__ = ["StandIn", "read_inert"]

_ZIP: Final = b"PK\x03\x04"
# How the form that torch wrote before 1.6 begins: a pickle of this number, whose protocol is the second byte.
_OLD: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Of these torch never reads anything, by whatever name.
_BLOCKED: Final = ("nt", "os", "posix", "sys")

# The names that a file may use are those of the whole process, so that two readers at once would see each other's.
_reading: Final = Lock()


@final
class StandIn:
    """What stands for an object in a file whose class is not plain data. Nothing of that class was looked up, let alone run.

    Attributes:
        name: The module and name of the class, or of the function that would have made it, as the file has it.
        arguments: What it would have been called with.
        state: What it would have been filled with; `None` for nothing.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<a {self.name}>"


def read_inert(path: Path) -> Any:
    """What a file of `torch.save` holds. Nothing in it is executed; classes that torch does not count as plain data become stand-ins.

    Those that the program itself has allowed by `torch.serialization.add_safe_globals` are what they are. Tensors are mapped rather than
    read, unless the file has the form of a torch before 1.6.

    Raises:
        CheckpointError: It cannot be read, is no such file, is damaged, or can be read only by running code from it.

    Example:
        >>> from fractions import Fraction
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "state.pt"
        >>> torch.save({"rate": Fraction(1, 2), "steps": 3}, path)
        >>> read_inert(path)
        {'rate': <a fractions.Fraction>, 'steps': 3}
    """
    try:
        with path.open("rb") as file:
            start = file.read(2 + len(_OLD))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. {_ELSE}") from error
    is_zip = start.startswith(_ZIP)
    if not is_zip and start[2:] != _OLD:
        raise CheckpointError(f"{path} is no file that torch.save wrote. {_ELSE}")
    unknown: list[str] = []
    with _reading:
        try:
            if is_zip:
                unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            return _load(path, names=_stand_ins(path, unknown), is_zip=is_zip)
        except Exception as error:  # A file that was made up can fail in any way.
            raise CheckpointError(_refusal(path, unknown, error, is_zip=is_zip)) from error


_ELSE: Final = "Name the file that holds the scaler's state, or load it yourself and pass the dictionary in place of the path."


def _load(path: Path, *, names: list[Any], is_zip: bool) -> Any:
    with warnings.catch_warnings(), torch.serialization.safe_globals(names):
        warnings.simplefilter("ignore")  # About forms of files that are old, or refused.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _refusal(path: Path, unknown: list[str], error: Exception, *, is_zip: bool) -> str:
    trusted = "If you trust who wrote it, load it yourself and pass what torch.load(..., weights_only=False) returned in place of the path."
    if blocked := sorted(name for name in unknown if name.split(".")[0] in _BLOCKED):
        return f"{path} cannot be read without running code: it names {blocked[0]}, which no state of a training run needs. Do not load it."
    if not isinstance(error, UnpicklingError):
        return f"{path} is damaged, or no file that torch.save wrote. {_ELSE}"
    if not is_zip:
        return (
            f"{path} has the form of a torch before 1.6, and holds more than tensors and plain values, so that it cannot be read without "
            f"running code. {trusted}"
        )
    reason = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0] or str(error).split("\n")[0]
    return f"{path} cannot be read without running code ({reason[:160].rstrip('.')}). {trusted}"


def _stand_ins(path: Path, names: list[str]) -> list[Any]:
    """What `torch.serialization.safe_globals` takes, so that a file gets something inert under each of these names."""
    if not names:
        return []
    lists, mappings = _containers(_pickle_in(path))
    kinds = [(_kind(name, like=OrderedDict if name in mappings else list if name in lists else StandIn), name) for name in names]
    return [*kinds, (StandIn, f"{StandIn.__module__}.{StandIn.__qualname__}")]


def _kind(name: str, *, like: type[Any]) -> type[Tensor]:
    """A class that makes something inert.

    It is one of tensors, because torch takes nothing else where a file says of which class a tensor is.

    Args:
        name: What a file calls it.
        like: A class of the standard library, where a file fills it with items as it does those.
    """

    def make(_: type[Any], *arguments: Any) -> Any:
        return StandIn(name, arguments) if like is StandIn else like()

    def refuse(*_: Any, **__: Any) -> Any:
        return NotImplemented

    # Without a __torch_dispatch__ it could not stand for a class of tensors that wrap others.
    return type("Unknown", (Tensor,), {"__new__": make, "__torch_dispatch__": classmethod(refuse)})


def _pickle_in(path: Path) -> bytes:
    """The pickle in a file of `torch.save`. Its checksum may be missing, so that `ZipFile.read` would refuse it."""
    with zipfile.ZipFile(path) as archive:
        found = next(info for info in archive.infolist() if info.filename.partition("/")[2] == "data.pkl")
    with path.open("rb") as file:
        file.seek(found.header_offset + 26)  # Where the header says how long the name and the extra field after it are.
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        return file.read(found.file_size)


def _containers(pickled: bytes) -> tuple[set[str], set[str]]:
    """The classes whose objects a pickle fills like lists, and those that it fills like dictionaries.

    The pickle is read, not run: this follows which name each object on its stack came from.
    """
    lists: set[str] = set()
    mappings: set[str] = set()
    filled = {"APPEND": lists, "APPENDS": lists, "SETITEM": mappings, "SETITEMS": mappings}
    stack: list[str | None] = []
    memo: dict[Any, str | None] = {}
    mark = "\n"  # No name has one.
    for code, argument, _ in pickletools.genops(pickled):
        takes = code.stack_before
        if pickletools.markobject in takes:
            while stack.pop() != mark:
                pass
            takes = takes[: takes.index(pickletools.markobject)]
        taken = [stack.pop() for _ in takes]
        origin = taken[-1] if taken else None  # What lay lowest, so that it is what is called or filled.
        if code.name in filled and origin:
            filled[code.name].add(origin)
        elif code.name == "GLOBAL":
            origin = str(argument).replace(" ", ".", 1)
        elif code.name == "MARK":
            origin = mark
        elif code.name in ("BINGET", "LONG_BINGET"):
            origin = memo.get(argument)
        elif code.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code.name not in ("REDUCE", "NEWOBJ", "BUILD", *filled):
            origin = None
        stack += [origin] * len(code.stack_after)
    return lists, mappings
