"""Records as documents, and documents on a terminal or as one HTML file. Nothing here loads torch.

Example:
    >>> document = Document(kind="Precision comparison", title="digits", conclusion="Train in bf16: it is faster.")
    >>> "Train in bf16" in render_html(document)
    True
"""

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
