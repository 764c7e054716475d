"""What autocast's lists of operations look like as a document."""

from __future__ import annotations

from collections import Counter
from typing import Final

from halfstep.records import OperationLists, Treatment
from halfstep.report.document import Column, Document, Section, Table
from halfstep.report.quantities import MISSING

__all__ = ["ops_document"]

# How one of them and several do it.
_MEANINGS: Final[dict[Treatment, tuple[str, str]]] = {
    "lower": ("runs in the dtype of the region", "run in the dtype of the region"),
    "fp32": ("runs in fp32", "run in fp32"),
    "promote": ("runs in the widest dtype among its arguments", "run in the widest dtype among their arguments"),
    "banned": ("raises an error", "raise an error"),
    "as_is": ("runs in what it is given", "run in what they are given"),
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
        caption=_legend(lists),
    )


def _legend(lists: OperationLists) -> str:
    shown = {treatment for each in lists.operations for treatment in (each.treatment, each.other)}
    return "; ".join(f"{treatment}: {one}" for treatment, (one, _) in _MEANINGS.items() if treatment in shown) + "."


def _conclusion(lists: OperationLists) -> str:
    if not lists.operations:
        if lists.against:
            return f"{lists.target} and {lists.against} treat them alike."
        return f"Autocast has no such operation on {lists.target}."
    counts = Counter(each.treatment for each in lists.operations)
    told = ", ".join(
        f"{counts[treatment]} {one if counts[treatment] == 1 else several}"
        for treatment, (one, several) in _MEANINGS.items()
        if counts[treatment]
    )
    if len(lists.operations) == 1:
        only = lists.operations[0]
        other = f", and on {lists.against} it {_MEANINGS[only.other][0]}" if only.other else ""
        return f"{only.name} on {lists.target} {_MEANINGS[only.treatment][0]}{other}."
    where = f"on {lists.target}" + (f", and otherwise on {lists.against}" if lists.against else "")
    return f"Of {len(lists.operations)} operations {where}: {told}."
