"""One process writes what a run goes on from into one file."""

from __future__ import annotations

import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor

from halfstep._torch import dense_parts, storage_key
from halfstep.archive import part_of, publish, seal, unwritable
from halfstep.archive.shelves import remove
from halfstep.archive.streams import EagerStream
from halfstep.archive.threads import together
from halfstep.archive.wording import bytes_text
from halfstep.checkpoint.contents import Contents
from halfstep.checkpoint.trees import named, replaced, tensors_in
from halfstep.errors import CheckpointError
from halfstep.numerics.ranges import dtype_name
from halfstep.records import CheckpointRecord, PartRecord, TensorRecord

__all__ = ["check_room", "clean_up", "record_of", "write_file", "write_sealed"]

_saving: Final = threading.Lock()


def write_file(contents: Contents, path: Path) -> None:
    """Writes a checkpoint of one process; a reader sees the file that was there before or the whole new one, whatever happens.

    Raises:
        CheckpointError: It cannot be written. What was there before is untouched, and nothing is left behind.
    """
    _check_target(path)
    part = part_of(path)
    with clean_up(part, path):
        write_sealed(contents, part, ranks=1, rank=0)
        publish(part, path)


def _check_target(path: Path) -> None:
    """Accepts a name that nothing has, or a file.

    Raises:
        CheckpointError: It is a folder, a device or the like, or cannot be a name.
    """
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no file, but a device or the like"
            raise CheckpointError(f"{path} is {what}: it is not replaced. Name a file.")
    except OSError as error:
        raise CheckpointError(f"Cannot write {path}: {error.strerror or error}.") from error


def write_sealed(contents: Contents, path: Path, *, ranks: int, rank: int) -> CheckpointRecord:
    """Writes what a process has of a checkpoint into a file that says what is in it, with checksums; flushed to the disk.

    Args:
        contents: What it has.
        path: The file, which must not exist.
        ranks: How many processes save together.
        rank: Which of them this is.

    Raises:
        CheckpointError: It cannot be written.
    """
    _check_readable(contents.tree)
    record = record_of(contents, ranks=ranks, rank=rank)
    needed = sum(part.untyped_storage().nbytes() for part in _memory_of(contents.tree).values())
    check_room(path, needed)
    sums: dict[str, int] = {}
    try:
        # A file object rather than a path, so that the name of the file is no part of what is in it.
        # It is buffered, since a raw one writes up to 2 GiB in a call, and torch does not look at how much was written.
        with path.open("xb") as file, _without_checksums():
            stream: Any = EagerStream(file)  # torch's types know of no streams but files.
            together(lambda: torch.save(contents.tree, stream), lambda: sums.update(_sums_of(contents.tree)))
    except (OSError, RuntimeError) as error:  # torch's writer raises a RuntimeError when a disk is full.
        check_room(path, needed, found=error)
        raise unwritable(path, _said_by_system(error)) from error
    seal(path, record, sums=sums)
    return record


def _sums_of(tree: Any) -> dict[str, int]:
    """The CRC-32 of what lies in the memory of the host, by the names of the records that `torch.save` writes it to."""
    return {
        f"data/{number}": crc32(torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).numpy().data)
        for number, part in enumerate(_memory_of(tree).values())
        if part.device.type == "cpu"
    }


def _memory_of(tree: Any) -> dict[int, Tensor]:
    """For each stretch of memory in a nested state the first tensor that lies in it, in the order in which `torch.save` numbers them."""
    found: dict[int, Tensor] = {}
    for _, tensor in tensors_in(tree):
        for part in dense_parts(tensor):
            found.setdefault(storage_key(part), part)
    return found


def _said_by_system(error: BaseException) -> OSError:
    """What went wrong in the file, which torch's writer covers with an error of its own when it closes it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return OSError(str(error)) if found is None else found


def _check_readable(tree: Any) -> None:
    """Accepts a state that can be read again once it is written; its tensors are left out.

    Raises:
        CheckpointError: torch would refuse to read it without running code.
    """
    file = BytesIO()
    try:
        torch.save(replaced(tree, lambda _: None), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # Whatever it is, the run must not count on such a checkpoint.
        raise CheckpointError(
            f"This state cannot be saved: torch would refuse to read it again ({error}). Leave out of extra, and of the state of modules, "
            "optimizers and schedulers, what is no tensor, number or text."
        ) from error


@contextmanager
def clean_up(part: Path, path: Path) -> Iterator[None]:
    """A block that writes a file or a folder aside: what it left unfinished is removed when it raises.

    Args:
        part: What is written.
        path: The name that it is to have, by which users know it.
    """
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            remove(part)
        if isinstance(error, CheckpointError):
            raise CheckpointError(str(error).replace(str(part), str(path))) from error
        raise


def check_room(path: Path, needed: int, *, found: Exception | None = None) -> None:
    """Accepts a disk that has room for what is to be written.

    Args:
        path: Where.
        needed: In bytes; what was written of it counts as free.
        found: What went wrong while it was written; `None` before.

    Raises:
        CheckpointError: There is no room, or no such folder.
    """
    try:
        free = shutil.disk_usage(path.parent).free
        written = path.stat().st_size if path.exists() else 0
    except OSError as error:
        raise CheckpointError(f"Cannot write {path}: {error.strerror or error}.") from error
    if free + (written if found is not None else 0) < needed:
        raise CheckpointError(
            f"The disk is full: {path.parent} has {bytes_text(free + written)} free, and this checkpoint needs {bytes_text(needed)}. "
            "Nothing was saved; older checkpoints are untouched. Make room, keep fewer of them, or save elsewhere."
        ) from found


@contextmanager
def _without_checksums() -> Iterator[None]:
    """A block in which `torch.save` computes no checksums: it is slow at that, and `seal` does it while the file goes to the disk.

    The setting is one of the whole process, so files that other threads save meanwhile have none, either; torch does not look at them.
    """
    with _saving:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


def record_of(contents: Contents, *, ranks: int, rank: int) -> CheckpointRecord:
    """What a file says about itself."""
    tensors = _tensor_records(contents.tree)
    parts = {name: [tensor for _, tensor in tensors_in(value)] for name, value in contents.tree.items() if name not in ("format", "step")}
    return CheckpointRecord(
        step=contents.step,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        halfstep=str(import_module("halfstep").__version__),  # The face of the package stands above all layers.
        torch=torch.__version__,
        python=platform.python_version(),
        device=contents.device,
        ranks=ranks,
        rank=rank,
        engines=contents.engines,
        parts=tuple(PartRecord(name=name, tensors=len(held), bytes=sum(map(_bytes, held))) for name, held in parts.items()),
        tensors=tensors,
    )


def _bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in dense_parts(tensor))


def _tensor_records(tree: dict[str, Any]) -> tuple[TensorRecord, ...]:
    """Each tensor with the record of the file that holds it: `torch.save` numbers memory in the order in which it meets it."""
    numbers = {key: number for number, key in enumerate(_memory_of(tree))}
    records = []
    for place, tensor in tensors_in(tree):
        storage = ",".join(f"data/{numbers[storage_key(part)]}" for part in dense_parts(tensor))
        records.append(TensorRecord(name=named(place), dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), storage=storage))
    return tuple(records)
