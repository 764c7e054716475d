"""Records as documents, and documents on a terminal or as one HTML file. Nothing here loads torch.

The names below load on first use: `halfstep lint` writes lines, and does not pay for templates of pages.

Example:
    >>> from halfstep.report import Document, render_html
    >>> document = Document(kind="Precision comparison", title="digits", conclusion="Train in bf16: it is faster.")
    >>> "Train in bf16" in render_html(document)
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.report.audit import audit_document
    from halfstep.report.comparison import comparison_document
    from halfstep.report.diagnosis import diagnosis_document
    from halfstep.report.document import Axis, Card, Column, Document, Excerpt, Fact, Figure, Item, Marks, Section, Series, Table
    from halfstep.report.html import render_html, write_html
    from halfstep.report.ops import ops_document
    from halfstep.report.policy import policy_document
    from halfstep.report.terminal import print_document
    from halfstep.report.trace import trace_document, trace_sections

__all__ = [
    "Axis",
    "Card",
    "Column",
    "Document",
    "Excerpt",
    "Fact",
    "Figure",
    "Item",
    "Marks",
    "Section",
    "Series",
    "Table",
    "audit_document",
    "comparison_document",
    "diagnosis_document",
    "ops_document",
    "policy_document",
    "print_document",
    "render_html",
    "trace_document",
    "trace_sections",
    "write_html",
]

# Where each name is defined.
_HOMES = {
    **dict.fromkeys(
        ("Axis", "Card", "Column", "Document", "Excerpt", "Fact", "Figure", "Item", "Marks", "Section", "Series", "Table"), "document"
    ),
    "audit_document": "audit",
    "comparison_document": "comparison",
    "diagnosis_document": "diagnosis",
    "ops_document": "ops",
    "policy_document": "policy",
    "print_document": "terminal",
    "render_html": "html",
    "trace_document": "trace",
    "trace_sections": "trace",
    "write_html": "html",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep.report' has no attribute {name!r}")
    value = getattr(import_module(f"halfstep.report.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
