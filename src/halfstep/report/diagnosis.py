"""What a diagnosis looks like as a document."""

from __future__ import annotations

import math
from typing import Final

from halfstep.records import UNKNOWN, Deviation, Diagnosis, NonFiniteTensor, OpRecord, Remedy, StuckTensor, VanishedGradients
from halfstep.report.conclusions import conclusion_text, format_text, percent_text, scale_text
from halfstep.report.document import Card, Column, Document, Excerpt, Fact, Item, Section, Table
from halfstep.report.quantities import MISSING, number_text
from halfstep.report.trace import LARGEST, module_text, origin_text

__all__ = ["diagnosis_document"]

# A terminal shows so many rows; a page shows all.
_MOST_ROWS: Final = 10

# What is told as one story, which a terminal must not turn round.
_STORY: Final = "diagnosis"


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """The document that shows a diagnosis in the order in which a person asks: what happened, where, why, what to do, and the proof.

    Args:
        diagnosis: What was found. Whatever does not belong to its cause is left out.

    Example:
        >>> document = diagnosis_document(Diagnosis(
        ...     schema=1, torch="2.13.0", task="digits", precision="fp16", target="cuda", device="cpu", cause="healthy", step=100,
        ...     steps=100, skips=0, loss=2.3, scale=65536.0, passing_scale=None, origin=None, first_nan=None, explanation="", remedies=(),
        ...     evidence=(), replays=1, is_reproduced=True, tensors=(), deviation=None, vanished=(), stuck=(), excerpt=(),
        ...     interrupted=False,
        ... ))
        >>> document.conclusion
        'Nothing is wrong: 100 steps were trained in fp16, none skipped.'
    """
    place = f"{diagnosis.target}, rehearsed on a CPU" if diagnosis.target else diagnosis.device
    return Document(
        kind="Diagnosis",
        title=diagnosis.task,
        subtitle=" · ".join((diagnosis.precision, place, f"torch {diagnosis.torch}")),
        conclusion=conclusion_text(diagnosis),
        notices=_notices(diagnosis),
        sections=(_event(diagnosis), *_place(diagnosis), *_reason(diagnosis), *_advice(diagnosis), *_proof(diagnosis)),
    )


def _notices(diagnosis: Diagnosis) -> tuple[str, ...]:
    if not diagnosis.interrupted:
        return ()
    return ("The diagnosis was interrupted: this is what was known by then, and the cause may be another one.",)


def _event(diagnosis: Diagnosis) -> Section:
    loss = number_text(diagnosis.loss)
    is_broken = diagnosis.loss is not None and not math.isfinite(diagnosis.loss)
    facts = (
        Fact(label="Loss", value=loss, tone="bad" if is_broken else "neutral"),
        Fact(label="Loss scale", value=scale_text(diagnosis.scale), detail=_other_scale(diagnosis)),
        Fact(
            label="Skipped steps",
            value=f"{diagnosis.skips}",
            detail=f"of {diagnosis.steps} trained",
            tone="bad" if diagnosis.skips and diagnosis.is_finding else "neutral",
        ),
    )
    return Section(title="What happened", cards=(Card(title=f"Step {diagnosis.step}", facts=facts),), group=_STORY)


def _other_scale(diagnosis: Diagnosis) -> str:
    if diagnosis.passing_scale is None:
        return ""
    helps = "gradients do not vanish" if diagnosis.cause == "underflow" else "the step is clean"
    return f"with {scale_text(diagnosis.passing_scale)} {helps}"


def _place(diagnosis: Diagnosis) -> tuple[Section, ...]:
    items = (*_origin_items(diagnosis.origin), *_nan_items(diagnosis.first_nan))
    excerpts = (Excerpt(lines=diagnosis.excerpt),) if diagnosis.excerpt else ()
    return (Section(title="Where", items=items, excerpts=excerpts, group=_STORY),) if items or excerpts else ()


def _origin_items(origin: OpRecord | None) -> tuple[Item, ...]:
    if origin is None:
        return ()
    node = f", by {origin.node}" if origin.node else ""
    line = _line(origin)
    return (
        Item(label="Operation", text=f"{origin.op}, in the {origin.phase} pass{node}"),
        Item(label="Module", text=module_text(origin.site.module)),
        *((Item(label="Line", text=line),) if line else ()),
        Item(label="Formats", text=f"{_formats(origin.input_dtypes)} → {_formats(origin.output_dtypes)}"),
        Item(label="Values", text=_values(origin)),
    )


def _nan_items(first_nan: OpRecord | None) -> tuple[Item, ...]:
    return (Item(label="First NaN", text=f"later: {origin_text(first_nan)}"),) if first_nan is not None else ()


def _line(origin: OpRecord) -> str:
    if origin.site.file == UNKNOWN:
        return ""
    forward = ", where its forward operation is called" if origin.phase == "backward" else ""
    return f"{origin.site.file}:{origin.site.line}{forward}"


def _formats(dtypes: tuple[str, ...]) -> str:
    return ", ".join(map(format_text, dtypes)) or MISSING


def _values(origin: OpRecord) -> str:
    """How many values are not finite, and how large the others, or all of them before they were rounded, are."""
    kinds = ((origin.nonfinite - origin.nans, "infinite"), (origin.nans, "NaN"))
    broken = " and ".join(f"{count:,} {kind}" for count, kind in kinds if count)
    inputs = "NaN" if origin.has_nan_input else "values that are not finite" if origin.has_nonfinite_input else "finite values"
    counted = f"{broken or 'none'} of {origin.elements:,}" + ("" if broken else " infinite or NaN")
    return f"{counted}, computed from {inputs}{_largest(origin)}"


def _largest(origin: OpRecord) -> str:
    dtype = next(iter(origin.output_dtypes), "")
    end = f"; {format_text(dtype)} ends at {number_text(LARGEST[dtype])}" if dtype in LARGEST else ""
    if origin.exact_absmax is not None and math.isfinite(origin.exact_absmax):
        return f"; the largest is {number_text(origin.exact_absmax)} before it is rounded{end}"
    if origin.absmax is not None and math.isfinite(origin.absmax):
        return f"; the largest is {number_text(origin.absmax)}{end}"
    return end


def _reason(diagnosis: Diagnosis) -> tuple[Section, ...]:
    paragraphs = (diagnosis.explanation,) if diagnosis.explanation else ()
    tables = _facts(diagnosis)
    if not paragraphs and not tables:
        return ()
    first = Section(title="Why", paragraphs=paragraphs, tables=tuple(_shortened(table) for table in tables), group=_STORY)
    longer = tuple(table for table in tables if len(table.rows) > _MOST_ROWS)
    return (first, *((Section(title="Why: all rows", tables=longer, place="page", group=_STORY),) if longer else ()))


def _facts(diagnosis: Diagnosis) -> tuple[Table, ...]:
    """What the cause is known by, as tables."""
    return (
        *((_tensor_table(diagnosis.tensors),) if diagnosis.tensors else ()),
        *((_deviation_table(diagnosis.deviation),) if diagnosis.deviation is not None else ()),
        *((_vanished_table(diagnosis.vanished),) if diagnosis.vanished else ()),
        *((_stuck_table(diagnosis.stuck),) if diagnosis.stuck else ()),
    )


def _shortened(table: Table) -> Table:
    left_out = len(table.rows) - _MOST_ROWS
    if left_out <= 0:
        return table
    caption = f"{table.caption} {left_out} more are on the page and in the JSON."
    return Table(columns=table.columns, rows=table.rows[:_MOST_ROWS], caption=caption)


def _tensor_table(tensors: tuple[NonFiniteTensor, ...]) -> Table:
    return Table(
        columns=(
            Column(header="Tensor"),
            Column(header="Kind"),
            Column(header="Infinite or NaN", alignment="right"),
            Column(header="Of", alignment="right"),
            Column(header="Since step", alignment="right"),
        ),
        rows=tuple(
            (each.name, each.kind, f"{each.nonfinite:,}", f"{each.elements:,}", MISSING if each.since is None else f"{each.since}")
            for each in tensors
        ),
        caption="Before the step began.",
    )


def _deviation_table(deviation: Deviation) -> Table:
    errors = (
        ("The result", deviation.error),
        ("What it was computed from", deviation.input_error),
        ("The loss", deviation.loss_error),
        ("All gradients together", deviation.gradient_error),
    )
    return Table(
        columns=(Column(header="Against fp32"), Column(header="Relative error", alignment="right")),
        rows=tuple((what, number_text(error, digits=2)) for what, error in errors),
        caption="The L2 norm of the difference over that of the values in fp32. The result is judged by a sample of its values; of what it "
        "was computed from, the largest error counts.",
    )


def _vanished_table(vanished: tuple[VanishedGradients, ...]) -> Table:
    return Table(
        columns=(
            Column(header="Module"),
            Column(header="Zero", alignment="right"),
            Column(header="Of", alignment="right"),
            Column(header="Share", alignment="right"),
        ),
        rows=tuple((module_text(each.module), f"{each.zeros:,}", f"{each.elements:,}", percent_text(each.share)) for each in vanished),
        caption="Gradients of each module's own parameters that are not zero in fp32.",
    )


def _stuck_table(stuck: tuple[StuckTensor, ...]) -> Table:
    return Table(
        columns=(
            Column(header="Tensor"),
            Column(header="Format"),
            Column(header="Unchanged", alignment="right"),
            Column(header="Of", alignment="right"),
            Column(header="Share", alignment="right"),
        ),
        rows=tuple(
            (each.name, format_text(each.dtype), f"{each.stuck:,}", f"{each.elements:,}", percent_text(each.share)) for each in stuck
        ),
        caption="Values that one step would change in fp32, and does not change as they are stored.",
    )


def _advice(diagnosis: Diagnosis) -> tuple[Section, ...]:
    if not diagnosis.remedies and (not diagnosis.is_finding or diagnosis.interrupted):
        return ()
    legend = " ".join(
        (
            *(("Verified: the step that failed, and three further steps, were replayed with it and were clean.",) * diagnosis.verified),
            *(("Not tried: nothing was replayed with it.",) * any(not remedy.verified for remedy in diagnosis.remedies)),
        )
    )
    return (
        Section(
            title="What to do",
            paragraphs=(legend or "No remedy was found.",),
            items=tuple(_remedy_item(remedy, diagnosis=diagnosis) for remedy in diagnosis.remedies),
            group=_STORY,
        ),
    )


def _remedy_item(remedy: Remedy, *, diagnosis: Diagnosis) -> Item:
    policy = f" As a policy: {diagnosis.precision}; {remedy.override}" if remedy.override is not None else ""
    return Item(label="Verified" if remedy.verified else "Not tried", text=f"{remedy.text}{policy}")


def _proof(diagnosis: Diagnosis) -> tuple[Section, ...]:
    if not diagnosis.evidence:
        return ()
    many = diagnosis.replays != 1
    table = Table(
        columns=(
            Column(header="Question"),
            Column(header="Precision"),
            Column(header="Loss scale", alignment="right"),
            Column(header="Clean"),
            Column(header="Answer"),
        ),
        rows=tuple(
            (
                each.question,
                each.precision or MISSING,
                MISSING if each.scale is None else scale_text(each.scale),
                "yes" if each.is_clean else "no",
                each.answer,
            )
            for each in diagnosis.evidence
        ),
        caption=f"The step was replayed {diagnosis.replays} time{'s' * many}. Clean: the loss and all gradients are finite; where nothing "
        "was replayed, nothing was found.",
    )
    return (Section(title="Proof", tables=(table,)),)
