"""What autocast's lists of operations look like as a document."""

from __future__ import annotations

from collections import Counter
from typing import Final

from halfstep.records import OperationLists, Treatment
from halfstep.report.document import Column, Document, Section, Table
from halfstep.report.quantities import MISSING

__all__ = ["ops_document"]

_MEANINGS: Final[dict[Treatment, str]] = {
    "lower": "run in the dtype of the region",
    "fp32": "run in fp32",
    "promote": "run in the widest dtype among their arguments",
    "banned": "raise",
    "as_is": "run in what they are given",
}


def ops_document(lists: OperationLists) -> Document:
    """The document that shows what autocast does to operations, a section for each treatment.

    Args:
        lists: What was found.

    Example:
        >>> lists = OperationLists(schema=1, torch="2.13.0", target="cuda", against="", pattern="", operations=())
        >>> ops_document(lists).conclusion
        'Autocast has no such operation on cuda.'
    """
    return Document(
        kind="Operations of autocast",
        title=lists.target if not lists.against else f"{lists.target} against {lists.against}",
        subtitle=" · ".join(part for part in (f"torch {lists.torch}", lists.pattern) if part),
        conclusion=_conclusion(lists),
        sections=() if not lists.operations else (Section(title="Operations", tables=(_table(lists),)),),
    )


def _table(lists: OperationLists) -> Table:
    order = list(_MEANINGS)
    rows = sorted(lists.operations, key=lambda each: (order.index(each.treatment), each.name))
    return Table(
        columns=(
            Column(header="Operation"),
            Column(header=f"On {lists.target}"),
            *((Column(header=f"On {lists.against}"),) if lists.against else ()),
        ),
        rows=tuple((each.name, each.treatment, *((each.other or MISSING,) if lists.against else ())) for each in rows),
    )


def _conclusion(lists: OperationLists) -> str:
    if not lists.operations:
        if lists.against:
            return f"{lists.target} and {lists.against} treat them alike."
        return f"Autocast has no such operation on {lists.target}."
    counts = Counter(each.treatment for each in lists.operations)
    told = ", ".join(f"{counts[treatment]} {meaning}" for treatment, meaning in _MEANINGS.items() if counts[treatment])
    where = f"on {lists.target}" + (f", and otherwise on {lists.against}" if lists.against else "")
    return f"Of {len(lists.operations)} operations {where}: {told}."
