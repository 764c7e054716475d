"""What inspected checkpoints look like as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from halfstep.archive import bytes_text
from halfstep.records import CheckpointRecord, EngineRecord, Inspection, Inspections
from halfstep.report.document import Column, Document, Item, Section, Table
from halfstep.report.quantities import MISSING, number_text
from halfstep.report.runs.wording import count_text, time_text

__all__ = ["checkpoints_document"]

_QUICK: Final = (
    "The tensors were not read, so that damage to them is not seen: the answer is about the rest of each file. Without --quick, every "
    "byte is read."
)
_PENDING: Final = "A step was in progress: its gradients so far are in the checkpoint."


def checkpoints_document(found: Inspections, *, quick: bool = False, tensors: bool = False) -> Document:
    """The document that shows checkpoints: what is wrong with them first, then what they hold.

    Args:
        found: What was found, at least one checkpoint.
        quick: Whether the tensors in them were left unread; it says so.
        tensors: Whether every tensor is listed.

    Example:
        >>> lost = Inspection(path="step-00000100.pt", kind="file", bytes=0, fault="step-00000100.pt is damaged: it is empty.",
        ...     checkpoint=None)
        >>> checkpoints_document(Inspections(inspections=(lost,))).conclusion
        'step-00000100.pt is damaged: it is empty.'
    """
    inspections = found.inspections
    single = inspections[0] if len(inspections) == 1 else None
    record = single.checkpoint if single is not None else None
    return Document(
        kind="Checkpoint" if single is not None else "Checkpoints",
        title=single.path if single is not None else count_text(len(inspections), "checkpoint"),
        subtitle=_subtitle(record) if record is not None else "",
        conclusion=_conclusion(inspections, quick=quick),
        notices=(_QUICK,) if quick else (),
        sections=(
            *_fault_sections(inspections),
            *((_list_section(inspections),) if single is None else ()),
            *(_content_sections(single, record) if single is not None and record is not None else ()),
            *(_tensor_sections(inspections) if tensors else ()),
        ),
    )


def _subtitle(record: CheckpointRecord) -> str:
    versions = f"halfstep {record.halfstep} · torch {record.torch} · Python {record.python}"
    return f"{versions} · {record.device} · {count_text(record.ranks, 'rank')}"


def _conclusion(inspections: Sequence[Inspection], *, quick: bool) -> str:
    valid = [one for one in inspections if one.is_valid]
    what = " as far as it was read: all but its tensors" if quick else ": every byte of it"
    if len(inspections) == 1:
        only = inspections[0]
        return f"{only.path} is valid{what} is what was saved{_at(only)}." if valid else only.fault
    if not valid:
        return f"None of {len(inspections):,} checkpoints is valid."
    newest = max(valid, key=_age)
    if len(valid) == 1:
        return f"One of {len(inspections):,} checkpoints is valid: {newest.path}{_at(newest)}."
    return f"{len(valid):,} of {len(inspections):,} checkpoints are valid; the newest of those is {newest.path}{_at(newest)}."


def _age(one: Inspection) -> tuple[int, str]:
    return (one.checkpoint.step, one.checkpoint.time) if one.checkpoint is not None else (-1, "")


def _at(one: Inspection) -> str:
    return f" at step {one.checkpoint.step:,}" if one.checkpoint is not None else ""


def _fault_sections(inspections: Sequence[Inspection]) -> tuple[Section, ...]:
    # Of a single one, the conclusion says it.
    faults = tuple(one.fault for one in inspections if not one.is_valid) if len(inspections) > 1 else ()
    return (Section(title="What is wrong", paragraphs=faults),) if faults else ()


def _list_section(inspections: Sequence[Inspection]) -> Section:
    columns = (
        Column(header="Checkpoint"),
        Column(header="Valid"),
        Column(header="Step", alignment="right"),
        Column(header="Saved"),
        Column(header="Precision"),
        Column(header="Scale", alignment="right"),
        Column(header="Size", alignment="right"),
    )
    return Section(title="Checkpoints", tables=(Table(columns=columns, rows=tuple(map(_list_row, inspections))),))


def _list_row(one: Inspection) -> tuple[str, ...]:
    record = one.checkpoint
    known = (MISSING,) * 4
    if record is not None:
        scales = ", ".join(number_text(engine.scale) for engine in record.engines)
        precisions = ", ".join(engine.precision for engine in record.engines)
        known = (f"{record.step:,}", time_text(record.time), precisions or MISSING, scales or MISSING)
    return one.path, "yes" if one.is_valid else "no", *known, bytes_text(one.bytes)


def _content_sections(one: Inspection, record: CheckpointRecord) -> tuple[Section, ...]:
    items = (
        Item(label="Step", text=f"{record.step:,}"),
        Item(label="Saved", text=time_text(record.time)),
        Item(label="Size", text=f"{bytes_text(one.bytes)}, {count_text(len(record.tensors), 'tensor')}"),
        *((Item(label="Written by", text=f"rank {record.rank} of {record.ranks}"),) if one.kind == "file" and record.ranks > 1 else ()),
    )
    engines = (Section(title="Engines", tables=(_engine_table(record.engines),)),) if record.engines else ()
    parts = (Section(title="Parts", tables=(_part_table(record),)),) if record.parts else ()
    return Section(title="At a glance", items=items), *engines, *parts


def _engine_table(engines: Sequence[EngineRecord]) -> Table:
    is_named = any(engine.name for engine in engines)
    columns = (
        *((Column(header="Engine"),) if is_named else ()),
        Column(header="Precision"),
        Column(header="Policy"),
        Column(header="Scale", alignment="right"),
        Column(header="Steps", alignment="right"),
        Column(header="Skips", alignment="right"),
        Column(header="Micro-batches", alignment="right"),
    )
    rows = tuple(
        (
            *((engine.name or MISSING,) if is_named else ()),
            engine.precision,
            engine.policy,
            number_text(engine.scale),
            f"{engine.steps:,}",
            MISSING if engine.skips is None else f"{engine.skips:,}",
            f"{engine.micro_batches} of {engine.accumulate}",
        )
        for engine in engines
    )
    caption = _PENDING if any(engine.micro_batches for engine in engines) else ""
    return Table(columns=columns, rows=rows, caption=caption)


def _part_table(record: CheckpointRecord) -> Table:
    columns = (Column(header="Part"), Column(header="Tensors", alignment="right"), Column(header="Size", alignment="right"))
    return Table(columns=columns, rows=tuple((part.name, f"{part.tensors:,}", bytes_text(part.bytes)) for part in record.parts))


def _tensor_sections(inspections: Sequence[Inspection]) -> tuple[Section, ...]:
    columns = (Column(header="Tensor"), Column(header="Type"), Column(header="Shape"), Column(header="Stored in"))
    return tuple(
        Section(
            title="Tensors" if len(inspections) == 1 else f"Tensors of {one.path}",
            tables=(
                Table(
                    columns=columns,
                    rows=tuple((tensor.name, tensor.dtype, _shape_text(tensor.shape), tensor.storage) for tensor in one.checkpoint.tensors),
                ),
            ),
        )
        for one in inspections
        if one.checkpoint is not None and one.checkpoint.tensors
    )


def _shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"  # noqa: RUF001 - a multiplication sign is what readers are shown
