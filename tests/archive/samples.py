"""Checkpoints for tests: small ones that torch wrote, and what they say about themselves."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfstep.archive import seal, write_folder_record
from halfstep.records import CheckpointRecord, EngineRecord, FileRecord, FolderRecord, PartRecord, TensorRecord

__all__ = ["TENSORS", "digest", "engine", "folder", "frame", "record", "resealed", "saved", "sealed", "state", "tensor", "with_manifest"]


def tensor(name: str, storage: str, **changes: Any) -> TensorRecord:
    values: dict[str, Any] = {"dtype": "float32", "shape": (4,)}
    return TensorRecord(name=name, storage=storage, **(values | changes))


def engine(**changes: Any) -> EngineRecord:
    values: dict[str, Any] = {
        "name": "",
        "precision": "fp16",
        "policy": "fp16; head=fp32",
        "steps": 100,
        "skips": 3,
        "scale": 1024.0,
        "micro_batches": 0,
        "accumulate": 1,
    }
    return EngineRecord(**(values | changes))


# What `saved` writes: a table and a head that are one tensor, and one of the optimizer's.
TENSORS = (
    tensor("model.table", "data/0"),
    tensor("model.head", "data/0"),
    tensor("optimizer.state.0.exp_avg", "data/2"),
    tensor("model.nothing", "data/1", shape=(0,)),
)


def record(**changes: Any) -> CheckpointRecord:
    values: dict[str, Any] = {
        "step": 100,
        "time": "2026-01-31T12:00:00+00:00",
        "halfstep": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu",
        "ranks": 1,
        "rank": 0,
        "engines": (engine(),),
        "parts": (PartRecord(name="model", tensors=2, bytes=16), PartRecord(name="optimizer", tensors=1, bytes=16)),
        "tensors": TENSORS,
    }
    return CheckpointRecord(**(values | changes))


def state() -> dict[str, Any]:
    table = torch.arange(4.0)
    moments = torch.linspace(-1, 1, 4)
    return {"model": {"table": table, "head": table, "nothing": torch.zeros(0)}, "optimizer": {"state": {0: {"exp_avg": moments}}}}


def saved(path: Path, **more: Any) -> Path:
    """A file that torch wrote, as one that is not sealed yet."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with path.open("wb") as file:
            torch.save(state() | more, file)
    finally:
        torch.serialization.set_crc32_options(before)
    return path


def sealed(path: Path, checkpoint: CheckpointRecord | None = None) -> Path:
    """A checkpoint that is a file."""
    seal(saved(path), record() if checkpoint is None else checkpoint)
    return path


def frame(content: bytes) -> list[tuple[int, int]]:
    """Where the data of all records but the manifest begin and end, found by Python's zipfile and not by the code that is tested."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = [info for info in archive.infolist() if not info.filename.endswith("/halfstep.json")]
    begins = [
        info.header_offset
        + 30
        + int.from_bytes(content[info.header_offset + 26 : info.header_offset + 28], "little")
        + int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
        for info in infos
    ]
    return sorted((begin, begin + info.file_size) for begin, info in zip(begins, infos, strict=True))


def digest(content: bytes) -> str:
    """The digest that the comment of an archive must have."""
    rest = bytearray()
    last = 0
    for begin, end in frame(content):
        rest += content[last:begin]
        last = end
    return hashlib.sha256(rest + content[last:-64]).hexdigest()


def resealed(content: bytes) -> bytes:
    """An archive with the digest that its frame has: what somebody would write who knows how checkpoints are sealed."""
    return content[:-64] + digest(content).encode()


def with_manifest(path: Path, manifest: bytes) -> Path:
    """A checkpoint that says something else about itself, with a digest that is right."""
    content = saved(path).read_bytes()
    with zipfile.ZipFile(path, "a") as archive:
        for info, (begin, end) in zip(archive.infolist(), frame(content), strict=True):
            info.CRC = zlib.crc32(content[begin:end])
        archive.writestr("archive/halfstep.json", manifest)
        archive.comment = b"halfstep:" + b"0" * 64
    path.write_bytes(resealed(path.read_bytes()))
    return path


def folder(path: Path, *, ranks: int = 2, **changes: Any) -> Path:
    """A checkpoint that is a folder; the files of `torch.distributed.checkpoint` hold other bytes, which nobody reads as such."""
    path.mkdir()
    files = []
    for rank in range(ranks):
        spread = path / f"__{rank}_0.distcp"
        spread.write_bytes(bytes(range(rank, rank + 100)))
        files += [_stretch(spread, 0, 60, "model.spread"), _stretch(spread, 60, 40, "optimizer.spread")]
        files.append(_stretch(sealed(path / f"rank-{rank}.pt", record(ranks=ranks, rank=rank))))
    (path / ".metadata").write_bytes(b"what lies where")
    files.append(_stretch(path / ".metadata"))
    values: dict[str, Any] = {"checkpoint": record(ranks=ranks), "files": tuple(files)}
    write_folder_record(path, replace(FolderRecord(**values), **changes))
    return path


def _stretch(path: Path, offset: int = 0, length: int | None = None, name: str = "") -> FileRecord:
    content = path.read_bytes()[offset : None if length is None else offset + length]
    return FileRecord(file=path.name, offset=offset, length=len(content), crc32=zlib.crc32(content), name=name)
