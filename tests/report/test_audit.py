# ruff: noqa: RUF001
"""An audit as a document."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import given, settings
from rich.console import Console

from halfstep.records import UNKNOWN, Audit
from halfstep.report import Document, Section, Table, audit_document, print_document, render_html
from tests.audit import samples
from tests.strategies import audits

ATTACK = "</script><img src=x onerror=alert(1)>"


def section(document: Document, title: str) -> Section:
    return next(one for one in document.sections if one.title == title)


def table(document: Document, title: str) -> Table:
    (only,) = section(document, title).tables
    return only


def printed(document: Document) -> str:
    out = io.StringIO()
    print_document(document, Console(file=out))
    return out.getvalue()


@pytest.mark.parametrize(
    ("changes", "conclusion"),
    [
        ({}, "8 of 10 operations run in fp16, with 75 % of the time; nothing overflows with a loss scale of 65536."),
        ({"scale": 1.0}, "nothing overflows."),
        ({"seconds": None, "lowered_seconds": None}, "8 of 10 operations run in fp16; nothing overflows"),
        ({"precision": "bf16; head=fp32"}, "operations run in bf16,"),
        ({"precision": "pure fp16"}, "operations run in fp16,"),
        ({"precision": "fp32; head=fp16"}, "operations run in fp16,"),
        ({"precision": "fp32; head=fp16; neck=bf16"}, "operations run in half precision,"),
        (
            {"scale": 4096.0, "scaled_origin": samples.overflow(phase="backward")},
            "nothing overflows with a loss scale of 4096; with the initial scale of 65536 gradients overflow, first in aten.mm.default of "
            "head (train.py:12): training skips its first steps until the scale has come down.",
        ),
        ({"origin": samples.overflow()}, "Not finite: aten.mm.default in the forward pass of head (train.py:12) makes 2 of 8 values"),
        ({"origin": samples.overflow()}, "; the largest would be 102400, and fp16 ends at 65504."),
        (
            {"origin": samples.overflow(phase="backward"), "scale": 1.0},
            "Not finite, even without a loss scale: aten.mm.default in the backward",
        ),
        (
            {"origin": samples.overflow(phase="backward"), "scale": 2.0},
            "Not finite with a loss scale of 2: aten.mm.default in the backward",
        ),
        ({"loss": math.nan}, "The loss is NaN, and no operation began it: look at the batch and at the weights."),
    ],
)
def test_the_conclusion_says_what_matters_most(changes: dict[str, Any], conclusion: str) -> None:
    assert conclusion in audit_document(samples.audit(**changes)).conclusion


def test_the_step_in_numbers() -> None:
    document = audit_document(samples.audit())
    assert (document.kind, document.title) == ("Audit", "examples/digits.py:task")
    assert document.subtitle == "fp16 · cuda, rehearsed on a CPU · torch 2.13.0"
    step = table(document, "One step")
    assert step.rows == (
        ("Run lowered", "8", "80 %", "75 %"),
        ("Kept in fp32", "2", "20 %", "25 %"),
        ("Casts", "30", "10 % of elements", "5 %"),
    )
    assert "One runs lowered when what it computes is in half precision." in step.caption
    assert "Casts are counted apart (75 % of both together)" in step.caption
    assert "not how fast the target is" in step.caption


def test_what_was_not_measured_is_said() -> None:
    document = audit_document(samples.audit(seconds=None, lowered_seconds=None, cast_seconds=None, target="", device="cuda"))
    step = table(document, "One step")
    assert [row[3] for row in step.rows] == ["–", "–", "–"]
    assert "Time was not measured" in step.caption
    assert document.subtitle == "fp16 · cuda · torch 2.13.0"
    assert "those of casts alone are known" in table(document, "Hottest places of underflow").caption
    assert "those of casts alone" not in table(audit_document(samples.audit()), "Hottest places of underflow").caption


def test_time_of_a_cpu_that_rehearses_nothing() -> None:
    assert "Time is that of the calls on this CPU." in table(audit_document(samples.audit(target="")), "One step").caption


def test_what_is_kept_and_why() -> None:
    kept = (
        samples.kept_operation(),
        samples.kept_operation("aten.add.Tensor", reason="promoted", seconds=0.015, modules=("", "a", "b")),
        samples.kept_operation("aten.mm.default", reason="not_autocast", seconds=0.0, modules=(UNKNOWN,)),
        samples.kept_operation("aten.mul.Tensor", reason="given_fp32", seconds=0.0, phase="backward", modules=()),
    )
    rows = table(audit_document(samples.audit(kept=kept)), "Kept in fp32, and why").rows
    assert rows == (
        ("_softmax", "forward", "on the fp32 list", "2", "25 %", "attn"),
        ("add.Tensor", "forward", "given fp32 among half", "2", "75 %", "(the model) and 2 more"),
        ("mm", "forward", "autocast off, or policy", "2", "0 %", "unknown"),
        ("mul.Tensor", "backward", "given fp32", "2", "0 %", "–"),
    )


def test_underflow_and_range() -> None:
    document = audit_document(samples.audit())
    assert table(document, "Hottest places of underflow").rows == (("head (train.py:12)", "backward", "1,234", "10 %", "mm"),)
    assert table(document, "Range headroom").rows == (("head", "fp16", "8188", "2^3.0", "0"),)


def test_a_terminal_shows_the_first_and_a_page_all() -> None:
    kept = tuple(samples.kept_operation(f"aten.op{index}.default") for index in range(20))
    ranges = tuple(samples.module_range(f"layer{index}") for index in range(13))
    document = audit_document(samples.audit(kept=kept, ranges=ranges))
    assert len(table(document, "Kept in fp32, and why").rows) == 12
    assert "8 more are on the page and in the JSON." in table(document, "Kept in fp32, and why").caption
    assert len(table(document, "All that is kept in fp32").rows) == 20
    assert section(document, "All that is kept in fp32").place == "page"
    assert len(table(document, "Range headroom of all modules").rows) == 13
    shown = printed(document)
    assert "op11" in shown
    assert "op12" not in shown


def test_nothing_found_is_no_section() -> None:
    document = audit_document(samples.audit(kept=(), underflow=(), ranges=()))
    assert [one.title for one in document.sections] == ["One step"]


def test_names_are_data() -> None:
    document = audit_document(samples.audit(task=ATTACK, kept=(samples.kept_operation(modules=(ATTACK,)),)))
    assert ATTACK not in render_html(document)


@given(audit=audits())
@settings(max_examples=50, deadline=None)
def test_any_audit_can_be_shown(audit: Audit) -> None:
    document = audit_document(audit)
    assert document.conclusion.endswith(".")
    assert printed(document)
