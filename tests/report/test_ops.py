"""Autocast's lists as a document."""

from __future__ import annotations

import io
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from rich.console import Console

from halfstep.records import OperationLists, OperationTreatment, Treatment
from halfstep.report import ops_document, print_document
from tests.strategies import operation_lists

FP32 = OperationTreatment(name="softmax.int", treatment="fp32", other=None)
LOWER = OperationTreatment(name="linear", treatment="lower", other=None)
BANNED = OperationTreatment(name="binary_cross_entropy", treatment="banned", other=None)
DIFFERENT = OperationTreatment(name="softmax.int", treatment="fp32", other="as_is")


def lists(*operations: OperationTreatment, **changes: Any) -> OperationLists:
    values: dict[str, Any] = {"schema": 1, "torch": "2.13.0", "target": "cuda", "against": "", "pattern": ""}
    return OperationLists(**(values | changes), operations=operations)


@pytest.mark.parametrize(
    ("found", "conclusion"),
    [
        (lists(), "Autocast has no such operation on cuda."),
        (lists(against="cpu"), "cuda and cpu treat them alike."),
        (lists(FP32), "softmax.int on cuda runs in fp32."),
        (lists(BANNED), "binary_cross_entropy on cuda raises an error."),
        (lists(DIFFERENT, against="cpu"), "softmax.int on cuda runs in fp32, and on cpu it runs in what it is given."),
        (
            lists(FP32, LOWER, LOWER, BANNED),
            "Of 4 operations on cuda: 2 run in the dtype of the region, 1 runs in fp32, 1 raises an error.",
        ),
        (lists(DIFFERENT, DIFFERENT, against="cpu"), "Of 2 operations on cuda, and otherwise on cpu: 2 run in fp32."),
    ],
)
def test_the_conclusion_counts(found: OperationLists, conclusion: str) -> None:
    assert ops_document(found).conclusion == conclusion


def test_the_table_is_by_treatment_and_name_and_says_what_each_means() -> None:
    document = ops_document(lists(FP32, BANNED, LOWER, pattern="x"))
    assert (document.title, document.subtitle) == ("cuda", "torch 2.13.0 · x")
    (table,) = document.sections[0].tables
    assert table.rows == (("linear", "lower"), ("softmax.int", "fp32"), ("binary_cross_entropy", "banned"))
    assert table.caption == "lower: runs in the dtype of the region; fp32: runs in fp32; banned: raises an error."


def test_two_targets_side_by_side() -> None:
    document = ops_document(lists(DIFFERENT, against="cpu"))
    (table,) = document.sections[0].tables
    assert document.title == "cuda against cpu"
    assert [column.header for column in table.columns] == ["Operation", "On cuda", "On cpu"]
    assert table.rows == (("softmax.int", "fp32", "as_is"),)
    assert table.caption == "fp32: runs in fp32; as_is: runs in what it is given."


@pytest.mark.parametrize("treatment", get_args(Treatment))
def test_every_treatment_has_a_meaning(treatment: Treatment) -> None:
    (table,) = ops_document(lists(OperationTreatment(name="x", treatment=treatment, other=None))).sections[0].tables
    assert table.caption.startswith(f"{treatment}: ")


@given(found=operation_lists())
@settings(max_examples=50, deadline=None)
def test_any_lists_can_be_shown(found: OperationLists) -> None:
    out = io.StringIO()
    print_document(ops_document(found), Console(file=out))
    assert out.getvalue()
