"""What an audit looks like as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from halfstep.records import Audit, KeptOperation, KeptReason
from halfstep.report.document import Column, Document, Section, Table
from halfstep.report.quantities import MISSING, number_text
from halfstep.report.trace import module_text, operation_text, origin_text, range_sections

__all__ = ["audit_document"]

# A terminal shows so many rows; a page shows all.
_MOST_ROWS: Final = 12

_REASONS: Final[dict[KeptReason, str]] = {
    "listed": "on the fp32 list",
    "promoted": "given fp32 among half",
    "not_autocast": "autocast off, or policy",
    "given_fp32": "given fp32",
}
_HALVES: Final = frozenset({"bf16", "fp16"})


def audit_document(audit: Audit) -> Document:
    """The document that shows an audit: what runs lowered first, then what does not, casts, underflow, and range.

    Args:
        audit: What was found. Whatever was not measured is shown as an en dash.

    Example:
        >>> audit = Audit(
        ...     schema=1, torch="2.13.0", task="digits", precision="fp16", target="cuda", device="cpu", scale=1024.0, initial_scale=65536.0,
        ...     loss=2.3, operations=10, lowered=8, seconds=0.02, lowered_seconds=0.015, cast_seconds=0.001, casts=4, cast_elements=100,
        ...     elements=1000, kept=(), underflow=(), ranges=(), origin=None, scaled_origin=None,
        ... )
        >>> audit_document(audit).conclusion
        '8 of 10 operations run in fp16, with 75 % of the time; nothing overflows with a loss scale of 1024.'
    """
    return Document(
        kind="Audit",
        title=audit.task,
        subtitle=" · ".join(
            (audit.precision, f"{audit.target}, rehearsed on a CPU" if audit.target else audit.device, f"torch {audit.torch}")
        ),
        conclusion=_conclusion(audit),
        sections=(
            Section(title="One step", tables=(_summary(audit),)),
            *_kept_sections(audit.kept),
            *((Section(title="Hottest places of underflow", tables=(_underflow(audit),)),) if audit.underflow else ()),
            *range_sections(audit.ranges),
        ),
    )


def _precision(audit: Audit) -> str:
    """The half precision that a policy names, or what several have in common."""
    default, *overrides = (part.strip() for part in audit.precision.removeprefix("pure ").split(";"))
    named = {default, *(override.rpartition("=")[2].strip() for override in overrides)} & _HALVES
    return named.pop() if len(named) == 1 else "half precision"


def _conclusion(audit: Audit) -> str:
    scale = f" with a loss scale of {audit.scale:g}" if audit.scale != 1 else ""
    if audit.origin is not None:
        # Where gradients overflow, the audit has lowered the scale as far as it goes.
        lowest = f"{scale or ', even without a loss scale'}" if audit.origin.phase == "backward" else ""
        return f"Not finite{lowest}: {origin_text(audit.origin)}."
    if not math.isfinite(audit.loss):
        return f"The loss is {number_text(audit.loss)}, and no operation began it: look at the batch and at the weights."
    share = _percent(audit.lowered_seconds, audit.seconds)
    time = f", with {share} of the time" if share != MISSING else ""
    told = f"{audit.lowered} of {audit.operations} operations run in {_precision(audit)}{time}; nothing overflows{scale}"
    if audit.scaled_origin is None:
        return f"{told}."
    return (
        f"{told}; with the initial scale of {audit.initial_scale:g} gradients overflow, first in {audit.scaled_origin.op} of "
        f"{audit.scaled_origin.site}: training skips its first steps until the scale has come down."
    )


def _summary(audit: Audit) -> Table:
    rows = (
        ("Run lowered", str(audit.lowered), _percent(audit.lowered, audit.operations), _percent(audit.lowered_seconds, audit.seconds)),
        (
            "Kept in fp32",
            str(sum(each.count for each in audit.kept)),
            _percent(sum(each.count for each in audit.kept), audit.operations),
            _percent(_seconds(audit.kept), audit.seconds),
        ),
        (
            "Casts",
            str(audit.casts),
            f"{_percent(audit.cast_elements, audit.elements)} of elements",
            _percent(audit.cast_seconds, audit.seconds),
        ),
    )
    return Table(
        columns=(
            Column(header="Operations"),
            Column(header="Count", alignment="right"),
            Column(header="Share", alignment="right"),
            Column(header="Share of time", alignment="right"),
        ),
        rows=rows,
        caption=_summary_caption(audit),
    )


def _summary_caption(audit: Audit) -> str:
    counted = (
        "Forward and backward. Operations that compute are counted; views and what only moves values are not. One runs lowered when what "
        "it computes is in half precision. Casts are counted apart "
        f"({_percent(audit.casts, audit.operations + audit.casts)} of both together), and shown against the time of those."
    )
    if audit.seconds is None:
        return f"{counted} Time was not measured: the device works on its own."
    if audit.target:
        return (
            f"{counted} Time is that of this CPU, which computes rehearsed operations in fp32: it tells where the work is, and "
            "not how fast the target is."
        )
    return f"{counted} Time is that of the calls on this CPU."


def _kept_sections(kept: Sequence[KeptOperation]) -> tuple[Section, ...]:
    if not kept:
        return ()
    shown = kept[:_MOST_ROWS]
    total = _seconds(kept)
    more = f"{len(kept) - len(shown)} more are on the page and in the JSON." if len(kept) > len(shown) else ""
    sections = (Section(title="Kept in fp32, and why", tables=(_kept_table(shown, total=total, caption=more),)),)
    if not more:
        return sections
    return (*sections, Section(title="All that is kept in fp32", tables=(_kept_table(kept, total=total, caption=""),), place="page"))


def _kept_table(kept: Sequence[KeptOperation], *, total: float | None, caption: str) -> Table:
    return Table(
        columns=(
            Column(header="Operation"),
            Column(header="Pass"),
            Column(header="Why"),
            Column(header="Count", alignment="right"),
            Column(header="Time", alignment="right"),
            Column(header="Where"),
        ),
        rows=tuple(
            (
                operation_text(each.op),
                each.phase,
                _REASONS[each.reason],
                str(each.count),
                _percent(each.seconds, total),
                _places(each.modules),
            )
            for each in kept
        ),
        caption=f"Time is the share of what is kept. {caption}".strip(),
    )


def _places(modules: Sequence[str]) -> str:
    if not modules:
        return MISSING
    first = module_text(modules[0])
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"


def _underflow(audit: Audit) -> Table:
    return Table(
        columns=(
            Column(header="Where"),
            Column(header="Pass"),
            Column(header="Flushed", alignment="right"),
            Column(header="Share", alignment="right"),
            Column(header="Operation"),
        ),
        rows=tuple(
            (str(each.site), each.phase, f"{each.flushed:,}", _percent(each.flushed, each.elements), operation_text(each.op))
            for each in audit.underflow
        ),
        caption="Values that are not zero, and became zero or subnormal."
        + ("" if audit.target else " Without a rehearsal, those of casts alone are known."),
    )


def _seconds(kept: Sequence[KeptOperation]) -> float | None:
    seconds = [each.seconds for each in kept if each.seconds is not None]
    return sum(seconds) if len(seconds) == len(kept) else None


def _percent(part: float | None, whole: float | None) -> str:
    if part is None or not whole:
        return MISSING
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 or not share else f"{share:.1g} %"
