"""What a checkpoint says about itself: readable without torch, and without touching what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records.base import AbstractRecord
from halfstep.records.step import Precision

__all__ = [
    "CHECKPOINT_SCHEMA",
    "CheckpointKind",
    "CheckpointRecord",
    "EngineRecord",
    "FileRecord",
    "FolderRecord",
    "Inspection",
    "Inspections",
    "PartRecord",
    "TensorRecord",
]

# The number of the format of a checkpoint on disk.
CHECKPOINT_SCHEMA = 1

CheckpointKind = Literal["file", "folder"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord(AbstractRecord):
    """A tensor in a checkpoint.

    Attributes:
        name: Where it belongs, such as `model.layer1.weight` or `optimizer.state.3.exp_avg`.
        dtype: Its type as torch names it, such as `float32`.
        shape: Its shape; of a tensor that is spread over ranks, the whole one's.
        storage: What holds it: the name of the record in the file, such as `data/17`, which several tensors may share; in a folder with
            the name of the file before it, and several with commas between them where a tensor is spread.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord(AbstractRecord):
    """A part of a checkpoint.

    Attributes:
        name: Such as `model`, `optimizer`, `scheduler`, `amp`, `random` or `extra`; with the engine's name and a dot before it where there
            are several engines.
        tensors: How many tensors it holds.
        bytes: What those take up.
    """

    name: str
    tensors: int
    bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord(AbstractRecord):
    """An engine at the time of a checkpoint.

    Attributes:
        name: Its name among several; empty where there is one.
        precision: Its precision.
        policy: Its policy, as text.
        steps: Optimizer steps that it had taken or skipped.
        skips: How many of them were skipped; `None` where nobody counts.
        scale: Its loss scale; `None` where losses are not scaled.
        micro_batches: How many micro-batches of a step in progress it had seen.
        accumulate: How many there are in a step.
    """

    name: str
    precision: Precision
    policy: str
    steps: int
    skips: int | None
    scale: float | None
    micro_batches: int
    accumulate: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(AbstractRecord):
    """A checkpoint: what is in it, and what wrote it.

    Attributes:
        schema: The number of the format.
        step: The number of the step that it was saved at, as the user counts.
        time: When, in UTC, as ISO 8601 with seconds.
        halfstep: The version of halfstep that wrote it.
        torch: The version of torch.
        python: The version of Python.
        device: The type of the device that was trained on.
        ranks: How many processes trained together.
        rank: Which of them wrote it, from 0.
        engines: The engines.
        parts: What it consists of.
        tensors: Every tensor in it.

    Example:
        >>> saved = CheckpointRecord(step=100, time="2026-01-31T12:00:00+00:00", halfstep="0.1.0", torch="2.13.0", python="3.11.2",
        ...     device="cpu", ranks=1, rank=0, engines=(), parts=(PartRecord(name="model", tensors=2, bytes=40),), tensors=())
        >>> CheckpointRecord.from_json(saved.to_json()) == saved
        True
    """

    schema: int = CHECKPOINT_SCHEMA
    step: int
    time: str
    halfstep: str
    torch: str
    python: str
    device: str
    ranks: int
    rank: int
    engines: tuple[EngineRecord, ...]
    parts: tuple[PartRecord, ...]
    tensors: tuple[TensorRecord, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord(AbstractRecord):
    """A stretch of a file of a checkpoint that is a folder.

    Attributes:
        file: The name of the file.
        offset: Where the stretch begins, in bytes.
        length: How many bytes it has.
        crc32: Its checksum.
        name: The tensor that it holds, or a part of it; empty for a whole file that is no tensor's.
    """

    file: str
    offset: int
    length: int
    crc32: int
    name: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRecord(AbstractRecord):
    """A checkpoint that is a folder, as several ranks write it.

    Attributes:
        schema: The number of the format.
        checkpoint: What is in all of it, as rank 0 knows it.
        files: Every byte of every other file in the folder.
    """

    schema: int = CHECKPOINT_SCHEMA
    checkpoint: CheckpointRecord
    files: tuple[FileRecord, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection(AbstractRecord):
    """What was found where a checkpoint should be.

    Attributes:
        path: Where.
        kind: `file` or `folder`.
        bytes: What it takes up on disk.
        fault: What is wrong with it; empty where it is valid.
        checkpoint: What it says of itself; `None` where that cannot be read.
    """

    path: str
    kind: CheckpointKind
    bytes: int
    fault: str
    checkpoint: CheckpointRecord | None

    @property
    def is_valid(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.fault


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inspections(AbstractRecord):
    """What was found, for each place that was looked at.

    Attributes:
        inspections: In the order in which they were looked at.
    """

    inspections: tuple[Inspection, ...]

    @property
    def has_findings(self) -> bool:
        """Whether anything is wrong."""
        return not all(each.is_valid for each in self.inspections)
