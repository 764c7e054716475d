"""What a diagnosis comes to, for each cause."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.records import CAUSES, Cause, NonFiniteTensor, VanishedGradients
from halfstep.report.conclusions import conclusion_text, format_text, percent_text, scale_text
from tests.audit.samples import op_record
from tests.report.diagnosis_samples import diagnosis

OVERFLOW = "aten.mm.default in the {} pass of head (train.py:12) makes 2 of 8 values infinite out of finite ones"
EXCESS = "; the largest would be 102400, and fp16 ends at 65504."


@pytest.mark.parametrize(
    ("cause", "changes", "conclusion"),
    [
        ("healthy", {}, "Nothing is wrong: 100 steps were trained in fp16, none skipped."),
        ("healthy", {"steps": 1, "precision": "bf16"}, "Nothing is wrong: 1 step was trained in bf16, none skipped."),
        ("healthy", {"skips": 1}, "Nothing is wrong: 100 steps were trained in fp16, and 1 of them was skipped."),
        ("healthy", {"skips": 2}, "Nothing is wrong: 100 steps were trained in fp16, and 2 of them were skipped."),
        (
            "healthy",
            {"precision": "fp16; head=fp32"},
            "Nothing is wrong: 100 steps were trained under the policy, none skipped.",
        ),
        ("data", {}, "The batch of step 5 holds infinite values or NaN before anything is computed: batch[0] (3 of 64 values)."),
        ("data", {"tensors": ()}, "The batch of step 5 holds infinite values or NaN before anything is computed."),
        (
            "parameters",
            {},
            "The model held infinite values or NaN before step 5 began: head.weight (1,200 of 6,400 values, since the update of step 4).",
        ),
        (
            "parameters",
            {"tensors": (NonFiniteTensor(name="mean", kind="buffer", nonfinite=1, elements=8, since=None),) * 3},
            "The model held infinite values or NaN before step 5 began: mean (1 of 8 values) and 2 more.",
        ),
        (
            "parameters",
            {"tensors": (NonFiniteTensor(name="weight", kind="parameter", nonfinite=1, elements=8, since=5),)},
            "The update of step 5 made the model infinite or NaN: weight (1 of 8 values, since the update of step 5).",
        ),
        ("model", {}, f"Step 5 breaks in fp32 as well, so it is no matter of precision: {OVERFLOW.format('forward')}."),
        ("model", {"origin": None}, "Step 5 breaks in fp32 as well, so it is no matter of precision."),
        ("forward", {}, f"Not finite in fp16, and finite in fp32: {OVERFLOW.format('forward')}{EXCESS}"),
        (
            "forward",
            {"precision": "fp16; neck=fp32"},
            f"Not finite under the policy, and finite in fp32: {OVERFLOW.format('forward')}{EXCESS}",
        ),
        ("scale", {}, "The loss scale of 65536 is too high for step 5, and nothing else is wrong: with 1024 the step is clean."),
        (
            "scale",
            {"scale": 2.0**24, "passing_scale": None},
            "The loss scale of 16777216 is too high for step 5, and nothing else is wrong.",
        ),
        ("backward", {}, f"Gradients overflow, at the lowest loss scale too, and not in fp32: {OVERFLOW.format('backward')}{EXCESS}"),
        (
            "precision",
            {},
            "All is finite, but aten.mm.default of head (train.py:12) loses its accuracy in fp16: a relative error of 1.2, where what it "
            "was computed from has 0.0040.",
        ),
        ("precision", {"deviation": None, "origin": None}, "All is finite, but accuracy is lost in fp16."),
        (
            "underflow",
            {},
            "Gradients become zero in fp16: 50 % of those of head that are not zero in fp32; with a loss scale of 4096 they do not.",
        ),
        (
            "underflow",
            {"passing_scale": None, "vanished": (VanishedGradients(module="", zeros=1, elements=1),)},
            "Gradients become zero in fp16: 100 % of those of (the model) that are not zero in fp32.",
        ),
        ("underflow", {"vanished": ()}, "Gradients become zero in fp16; with a loss scale of 4096 they do not."),
        (
            "update",
            {},
            "Updates are too small to change parameters that are stored in half precision: 90 % of head.weight stays as it is in bf16, and "
            "would change in fp32.",
        ),
        ("update", {"stuck": ()}, "Updates are too small to change parameters that are stored in half precision."),
    ],
)
def test_each_cause_has_its_sentence(cause: Cause, changes: dict[str, Any], conclusion: str) -> None:
    assert conclusion_text(diagnosis(cause, **changes)) == conclusion


def test_no_two_causes_have_the_same_sentence() -> None:
    assert len({conclusion_text(diagnosis(cause, origin=op_record())) for cause in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("interrupted", [True, False])
def test_a_step_that_fails_only_once_comes_first(cause: Cause, interrupted: bool) -> None:
    text = conclusion_text(diagnosis(cause, is_reproduced=False, step=7, interrupted=interrupted))
    assert text == "Step 7 failed, and did not fail again when it was replayed."


@pytest.mark.parametrize("cause", CAUSES)
def test_interrupted_without_a_finding_is_not_healthy(cause: Cause) -> None:
    text = conclusion_text(diagnosis(cause, interrupted=True, step=7))
    if cause == "healthy":
        assert text == "Interrupted in step 7: nothing was found by then."
    else:
        assert text == conclusion_text(diagnosis(cause, step=7))


def test_formats_and_scales() -> None:
    assert [format_text(dtype) for dtype in ("float16", "bfloat16", "float32", "int64", "")] == ["fp16", "bf16", "fp32", "int64", ""]
    assert [scale_text(scale) for scale in (1.0, 2.0**30, 2.0**100, 0.25)] == ["1", "1073741824", "1.26765e+30", "0.25"]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.99, "99 %"),
        (0.996, "over 99 %"),
        (0.01, "1 %"),
        (0.0096, "1 %"),
        (0.00123, "0.1 %"),
        (0.256, "26 %"),
    ],
)
def test_a_share_is_rounded_to_neither_all_nor_nothing(share: float, text: str) -> None:
    assert percent_text(share) == text
