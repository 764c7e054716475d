# ruff: noqa: RUF001
"""A trace as a document."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from rich.console import Console

from halfstep.numerics import trace
from halfstep.records import TRACE_SCHEMA, UNKNOWN, OpRecord, TraceRecord
from halfstep.report import Document, Section, print_document, render_html, trace_document, trace_sections
from halfstep.report.trace import FORMATS, LARGEST, module_text, operation_text, origin_text, range_sections
from tests.audit import samples
from tests.strategies import trace_records


def record(*ops: OpRecord, target: str = "") -> TraceRecord:
    return TraceRecord(schema=TRACE_SCHEMA, torch="2.13.0", target=target, ops=ops)


def section(sections: tuple[Section, ...], title: str) -> Section:
    return next(one for one in sections if one.title == title)


def printed(document: Document) -> str:
    out = io.StringIO()
    print_document(document, Console(file=out))
    return out.getvalue()


@pytest.mark.parametrize("dtype", FORMATS)
def test_formats_end_where_torch_says(dtype: str) -> None:
    assert torch.finfo(getattr(torch, dtype)).max == LARGEST[dtype]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "aten.mm.default in the forward pass of head (train.py:12) makes 2 of 8 values infinite out of finite ones; the largest would "
            "be 102400, and fp16 ends at 65504",
        ),
        ({"nans": 2}, "values NaN out of finite ones"),
        ({"nans": 1}, "values infinite or NaN out of finite ones"),
        ({"nans": 1, "has_nonfinite_input": True}, "makes 1 of 8 values NaN out of infinite ones"),
        ({"site": samples.site(UNKNOWN)}, "in the forward pass at train.py:12 makes"),
        ({"site": samples.site(UNKNOWN, file=UNKNOWN, line=0)}, "in the forward pass makes"),
        ({"site": samples.site("")}, "in the forward pass of (the model) (train.py:12) makes"),
        ({"phase": "backward"}, "in the backward pass of head"),
        ({"output_dtypes": ("bfloat16",), "exact_absmax": 3.4e38}, "the largest would be 3.400e+38, and bf16 ends at 3.390e+38"),
    ],
)
def test_an_origin_says_where_how_and_by_how_much(changes: dict[str, Any], text: str) -> None:
    assert text in origin_text(samples.overflow(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"exact_absmax": None}, {"exact_absmax": 0.0}, {"exact_absmax": math.inf}, {"output_dtypes": ()}, {"output_dtypes": ("int8",)}],
)
def test_an_origin_that_is_not_too_large_says_nothing_of_an_end(changes: dict[str, Any]) -> None:
    assert "ends at" not in origin_text(samples.overflow(**changes))


def test_names_are_short() -> None:
    assert module_text("") == "(the model)"
    assert module_text("a.b") == "a.b"
    assert operation_text("aten._softmax.default") == "_softmax"


@pytest.mark.parametrize(
    ("ops", "conclusion"),
    [
        ((), "No operation ran."),
        ((samples.op_record(),), "All results are finite."),
        ((samples.op_record(), samples.overflow()), "Not finite: aten.mm.default in the forward pass of head"),
        ((samples.overflow(has_nonfinite_input=True),), "no operation began it"),
    ],
)
def test_the_conclusion_says_whether_all_is_finite(ops: tuple[OpRecord, ...], conclusion: str) -> None:
    assert conclusion in trace_document(record(*ops)).conclusion


def test_the_range_of_each_module_and_format_the_tightest_first() -> None:
    ops = (
        samples.op_record(site=samples.site("a"), absmax=2.0),
        samples.op_record(site=samples.site("a"), absmax=16376.0, flushed=3),
        samples.op_record(site=samples.site("a"), output_dtypes=("float32",), absmax=1.0),
        samples.op_record(site=samples.site("b"), absmax=32752.0),
        samples.op_record(site=samples.site("c"), absmax=0.0),
        samples.overflow(site=samples.site("d")),
        samples.op_record("aten.t.default", site=samples.site("e"), absmax=None),
        samples.op_record("aten.eq.Tensor", site=samples.site("e"), output_dtypes=("bool",), absmax=None),
    )
    (table,) = section(trace_sections(record(*ops)), "Range headroom").tables
    assert table.rows == (
        ("d", "fp16", "–", "–", "2"),
        ("b", "fp16", "32752", "2^1.0", "0"),
        ("a", "fp16", "16376", "2^2.0", "0"),
        ("a", "fp32", "1.000", "2^128.0", "0"),
        ("c", "fp16", "0", "–", "0"),
    )


def test_how_often_operations_ran_in_each_format() -> None:
    ops = (
        samples.op_record("aten.add.Tensor", output_dtypes=("float32",)),
        samples.op_record(),
        samples.op_record(),
        samples.op_record(output_dtypes=("float32",)),
        samples.op_record("aten.t.default", absmax=None),
    )
    (table,) = section(trace_sections(record(*ops)), "Operations by format").tables
    assert [column.header for column in table.columns] == ["Operation", "fp16", "fp32"]
    assert table.rows == (("mm", "2", "1"), ("add.Tensor", "0", "1"))


def test_a_terminal_shows_the_first_and_a_page_all() -> None:
    ops = tuple(
        samples.op_record(f"aten.op{index}.default", site=samples.site(f"layer{index}"), absmax=float(index + 1)) for index in range(20)
    )
    sections = trace_sections(record(*ops))
    assert [(one.title, one.place) for one in sections] == [
        ("Range headroom", "everywhere"),
        ("Range headroom of all modules", "page"),
        ("Operations by format", "everywhere"),
        ("All operations by format", "page"),
    ]
    assert [len(one.tables[0].rows) for one in sections] == [12, 20, 12, 20]
    assert "The 12 of 20 with the least." in sections[0].tables[0].caption
    assert "The 12 of 20 that ran most often." in sections[2].tables[0].caption


def test_no_ranges_are_no_section() -> None:
    assert range_sections(()) == ()
    assert trace_sections(record(samples.op_record("aten.t.default", absmax=None))) == ()


def test_a_real_trace() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with trace(model) as seen:
        model(torch.full((1, 2), 3e4)).sum().backward()
    shown = printed(trace_document(seen.record))
    assert "All results are finite." in shown
    for part in ("Range headroom", "addmm", "relu", "fp32"):
        assert part in shown
    assert "rehearsed" not in shown
    assert "cuda, rehearsed on a CPU" in printed(trace_document(record(target="cuda")))


@given(record=trace_records())
@settings(max_examples=50, deadline=None)
def test_any_trace_can_be_shown(record: TraceRecord) -> None:
    document = trace_document(record)
    assert document.conclusion.endswith(".")
    assert printed(document)
    assert "<html" in render_html(document)
