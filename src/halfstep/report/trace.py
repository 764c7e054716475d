"""What a trace looks like as a document, and how its parts are written wherever they are shown."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from halfstep.records import UNKNOWN, ModuleRange, OpRecord, Site, TraceRecord
from halfstep.records.formats import FORMATS, LARGEST
from halfstep.report.document import Column, Document, Section, Table
from halfstep.report.quantities import MISSING, number_text

__all__ = ["FORMATS", "LARGEST", "module_text", "operation_text", "origin_text", "range_sections", "trace_document", "trace_sections"]

_ROOT: Final = "(the model)"

# A terminal shows so many rows; a page shows all.
_MOST_ROWS: Final = 12


def trace_document(record: TraceRecord) -> Document:
    """The document that shows a trace: where something stops being finite, the range of each module, and what ran in which format.

    Args:
        record: The trace, such as `seen.record` after `with halfstep.trace(model) as seen:`, or one that was read from a file.

    Example:
        >>> trace_document(TraceRecord(schema=1, torch="2.13.0", target="cuda", ops=())).conclusion
        'No operation ran.'
    """
    return Document(
        kind="Trace",
        title=f"{len(record.ops)} operations",
        subtitle=" · ".join(
            part for part in (f"{record.target}, rehearsed on a CPU" if record.target else "", f"torch {record.torch}") if part
        ),
        conclusion=_conclusion(record),
        sections=trace_sections(record),
    )


def trace_sections(record: TraceRecord) -> tuple[Section, ...]:
    """What a trace saw, as sections of a document that may be about more.

    Args:
        record: The trace.

    Example:
        >>> trace_sections(TraceRecord(schema=1, torch="2.13.0", target="", ops=()))
        ()
    """
    ranges = sorted(_ranges(record.ops), key=_tightness)
    return (*range_sections(ranges, note="Of results that are finite as a whole."), *_count_sections(record.ops))


def origin_text(origin: OpRecord) -> str:
    """Where and how an operation made something that is not finite, as the end of a sentence.

    Args:
        origin: The operation.

    Example:
        >>> origin = OpRecord(
        ...     op="aten.mul.Tensor", phase="forward", site=Site(module="head", file="train.py", line=12), input_dtypes=("float16",),
        ...     output_dtypes=("float16",), elements=8, absmax=float("inf"), nonfinite=2, nans=0, flushed=0, exact_absmax=102400.0,
        ...     has_nonfinite_input=False, has_nan_input=False, node="", seconds=1e-5,
        ... )
        >>> print(origin_text(origin))
        aten.mul.Tensor in the forward pass of head (train.py:12) makes 2 of 8 values infinite out of finite ones; the largest would be
        102400, and fp16 ends at 65504
    """
    if origin.makes_nonfinite:
        kind = "infinite" if not origin.nans else "NaN" if origin.nans == origin.nonfinite else "infinite or NaN"
        made = f"{origin.nonfinite} of {origin.elements} values {kind} out of finite ones"
    else:
        made = f"{origin.nans} of {origin.elements} values NaN out of infinite ones"
    return f"{origin.op} in the {origin.phase} pass{_where(origin.site)} makes {made}{_excess(origin)}"


def _where(site: Site) -> str:
    if site.module != UNKNOWN:
        return f" of {site}"
    return f" at {site.file}:{site.line}" if site.file != UNKNOWN else ""


def _excess(origin: OpRecord) -> str:
    """By how much a result is too large, where that is why it is not finite."""
    dtype = next(iter(origin.output_dtypes), "")
    exact, end = origin.exact_absmax, LARGEST.get(dtype)
    if exact is None or end is None or not end < exact < math.inf:
        return ""
    return f"; the largest would be {number_text(exact)}, and {FORMATS[dtype]} ends at {number_text(end)}"


def module_text(module: str) -> str:
    """The path of a module as a reader wants it.

    Example:
        >>> module_text("head"), module_text(""), module_text("unknown")
        ('head', '(the model)', 'unknown')
    """
    return module or _ROOT


def operation_text(op: str) -> str:
    """The name of an operation without what most have in common.

    Example:
        >>> operation_text("aten.mm.default"), operation_text("aten.mul.Tensor"), operation_text("c10d.barrier.default")
        ('mm', 'mul.Tensor', 'c10d.barrier')
    """
    return op.removeprefix("aten.").removesuffix(".default")


def range_sections(ranges: Sequence[ModuleRange], *, note: str = "") -> tuple[Section, ...]:
    """How far modules are from the end of their formats.

    Args:
        ranges: The modules, the one with the least headroom first.
        note: What else there is to say.

    Example:
        >>> part = ModuleRange(module="head", dtype="float16", ops=2, absmax=32752.0, nonfinite=0, flushed=0, headroom=1.0)
        >>> range_sections([part])[0].tables[0].rows
        (('head', 'fp16', '32752', '2^1.0', '0'),)
    """
    if not ranges:
        return ()
    shown = ranges[:_MOST_ROWS]
    if len(shown) == len(ranges):
        return (Section(title="Range headroom", tables=(_range_table(shown, caption=note),)),)
    first = f"{note} The {len(shown)} of {len(ranges)} with the least.".strip()
    return (
        Section(title="Range headroom", tables=(_range_table(shown, caption=first),)),
        Section(title="Range headroom of all modules", tables=(_range_table(ranges, caption=note),), place="page"),
    )


def _range_table(ranges: Sequence[ModuleRange], *, caption: str) -> Table:
    return Table(
        columns=(
            Column(header="Module"),
            Column(header="In"),
            Column(header="Largest", alignment="right"),
            Column(header="Headroom", alignment="right"),
            Column(header="Not finite", alignment="right"),
        ),
        rows=tuple(
            (
                module_text(part.module),
                FORMATS.get(part.dtype, part.dtype),
                number_text(part.absmax),
                MISSING if part.headroom is None else f"2^{part.headroom:.1f}",
                f"{part.nonfinite:,}",
            )
            for part in ranges
        ),
        caption=f"Headroom: what the largest finite magnitude may grow by. Gradients carry the loss scale. {caption}".strip(),
    )


def _conclusion(record: TraceRecord) -> str:
    if not record.ops:
        return "No operation ran."
    if record.origin is not None:
        return f"Not finite: {origin_text(record.origin)}."
    if any(op.nonfinite for op in record.ops):
        return "Some results are not finite, as were the values that they were computed from: no operation began it."
    return "All results are finite."


def _ranges(ops: Iterable[OpRecord]) -> list[ModuleRange]:
    groups: dict[tuple[str, str], list[OpRecord]] = defaultdict(list)
    for op in ops:
        dtype = next(iter(op.output_dtypes), "")
        if op.absmax is not None and dtype in FORMATS:
            groups[op.site.module, dtype].append(op)
    return [_range(module, dtype, members) for (module, dtype), members in groups.items()]


def _range(module: str, dtype: str, ops: Sequence[OpRecord]) -> ModuleRange:
    absmax = max((op.absmax for op in ops if op.absmax is not None and not op.nonfinite), default=None)
    return ModuleRange(
        module=module,
        dtype=dtype,
        ops=len(ops),
        absmax=absmax,
        nonfinite=sum(op.nonfinite for op in ops),
        flushed=sum(op.flushed for op in ops),
        headroom=math.log2(LARGEST[dtype]) - math.log2(absmax) if absmax else None,
    )


def _tightness(part: ModuleRange) -> tuple[bool, float]:
    return not part.nonfinite, math.inf if part.headroom is None else part.headroom


def _count_sections(ops: Sequence[OpRecord]) -> tuple[Section, ...]:
    """How often each operation ran in each format; views and what returns no floating-point numbers are left out."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for op in ops:
        dtype = next(iter(op.output_dtypes), "")
        if op.absmax is not None and dtype in FORMATS:
            counts[op.op][dtype] += 1
    if not counts:
        return ()
    rows = sorted(counts.items(), key=lambda each: (-each[1].total(), each[0]))
    shown = rows[:_MOST_ROWS]
    if len(shown) == len(rows):
        return (Section(title="Operations by format", tables=(_count_table(rows, caption=""),)),)
    more = f"The {len(shown)} of {len(rows)} that ran most often."
    return (
        Section(title="Operations by format", tables=(_count_table(shown, caption=more),)),
        Section(title="All operations by format", tables=(_count_table(rows, caption=""),), place="page"),
    )


def _count_table(rows: Sequence[tuple[str, Counter[str]]], *, caption: str) -> Table:
    formats = [dtype for dtype in FORMATS if any(count[dtype] for _, count in rows)]
    return Table(
        columns=(Column(header="Operation"), *(Column(header=FORMATS[dtype], alignment="right") for dtype in formats)),
        rows=tuple((operation_text(name), *(str(count[dtype]) for dtype in formats)) for name, count in rows),
        caption=caption,
    )
