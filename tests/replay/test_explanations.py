"""Why a step went wrong, in words: the numbers and the places in them."""

from __future__ import annotations

from math import inf, nan

import pytest

from halfstep.numerics import OUTSIDE
from halfstep.policy import Override
from halfstep.records import UNKNOWN, Deviation, NonFiniteTensor, OpRecord, StuckTensor, VanishedGradients
from halfstep.replay.alignment import Pair
from halfstep.replay.explanations import (
    explain_backward,
    explain_data,
    explain_forward,
    explain_model,
    explain_parameters,
    explain_precision,
    explain_scale,
    explain_underflow,
    explain_update,
    explain_witnessed,
)
from halfstep.replay.wording import amount, island_text, operation_name, place_text
from tests.replay.operations import detail, operation, run_of


def pair(*low: OpRecord, full: OpRecord | None = None, loss: float = nan, scale: float = 1.0) -> Pair:
    return Pair(
        low=run_of(*((op, detail(place - 1 if place else OUTSIDE)) for place, op in enumerate(low)), loss=loss, scale=scale),
        full=run_of() if full is None else run_of((full, detail(OUTSIDE))),
    )


class TestForward:
    def test_what_overflows_and_by_how_much(self) -> None:
        text = explain_forward(pair(operation(nonfinite=3, absmax=inf), full=operation(dtype="float32", absmax=131072.0)), 0)
        assert text == (
            "aten.mul.Tensor in net makes 3 of 8 values infinite out of finite values. The largest would be 131072, and fp16 ends at "
            "65504. In fp32 the same operation is finite."
        )

    def test_a_rehearsal_knows_the_largest_itself(self) -> None:
        text = explain_forward(pair(operation(nonfinite=3, exact=70000.0), full=operation(dtype="float32", absmax=131072.0)), 0)
        assert "The largest would be 70000, and fp16 ends at 65504." in text

    @pytest.mark.parametrize("full", [None, operation(absmax=inf), operation(absmax=None), operation(absmax=6e4)])
    def test_without_a_larger_number_nothing_is_said_of_the_range(self, full: OpRecord | None) -> None:
        assert "would be" not in explain_forward(pair(operation(nonfinite=3, exact=inf), full=full), 0)

    def test_bf16_ends_elsewhere(self) -> None:
        full = operation(dtype="float32", absmax=3.4e38)
        assert "would be 3.4e+38, and bf16 ends at 3.39e+38." in explain_forward(
            pair(operation(dtype="bfloat16", nonfinite=3), full=full), 0
        )

    @pytest.mark.parametrize(("nans", "kind"), [(0, "infinite"), (1, "infinite or NaN"), (3, "NaN")])
    def test_what_it_makes(self, nans: int, kind: str) -> None:
        assert f"makes 3 of 8 values {kind} out of finite values" in explain_forward(pair(operation(nonfinite=3, nans=nans)), 0)

    def test_what_it_is_given(self) -> None:
        assert "out of infinite values" in explain_forward(pair(operation(nonfinite=3, given="inf")), 0)

    def test_where_nan_comes_from(self) -> None:
        later = operation("aten.sub.Tensor", module="norm", nonfinite=1, nans=1, given="inf")
        text = explain_forward(pair(operation(nonfinite=1), operation(), later), 0)
        assert text.endswith("The first NaN comes later, in aten.sub.Tensor in norm.")
        assert "comes later" not in explain_forward(pair(operation(nonfinite=1, nans=1), later), 0)
        assert "comes later" not in explain_forward(pair(later, operation(nonfinite=1)), 1), "it came before"

    def test_what_nobody_sees(self) -> None:
        text = explain_forward(pair(operation(nonfinite=1), loss=2.0), 0)
        assert text.endswith("Later operations turn that into finite values, which are wrong: neither the loss nor a gradient shows it.")

    def test_an_operation_outside_of_any_module(self) -> None:
        assert explain_forward(pair(operation(module="", nonfinite=1)), 0).startswith("aten.mul.Tensor in the model makes")


class TestBackward:
    def test_no_scale_helps(self) -> None:
        low = operation(phase="backward", nonfinite=2, node="MulBackward0")
        full = operation(phase="backward", dtype="float32", absmax=1e5, node="MulBackward0")
        assert explain_backward(pair(low, full=full), 0, floor=1.0) == (
            "aten.mul.Tensor in the backward pass of net makes 2 of 8 values infinite out of finite values. The largest would be 100000, "
            "and fp16 ends at 65504. That is with a loss scale of 1, the lowest that training comes down to. In fp32 it is finite, so the "
            "operation needs fp32."
        )

    def test_the_largest_is_that_at_the_scale(self) -> None:
        low = operation(phase="backward", nonfinite=2)
        text = explain_backward(pair(low, full=operation(phase="backward", absmax=1e5), scale=8.0), 0, floor=0.5)
        assert "would be 800000" in text
        assert "with a loss scale of 0.5, the lowest" in text


class TestScale:
    def test_the_scales_and_the_first_that_overflows(self) -> None:
        text = explain_scale(run_of(), operation(phase="backward"), scale=65536.0, passing=1024.0)
        assert text.startswith(
            "Multiplied by 65536, gradients leave the range of fp16. aten.mul.Tensor in the backward pass of net is the "
        )
        assert "With a loss scale of 1024 the same step is clean" in text

    def test_without_an_operation(self) -> None:
        text = explain_scale(run_of(), None, scale=2.0**20, passing=0.25)
        assert text.startswith("Multiplied by 1.049e+06, gradients leave the range of half precision. With a loss scale of 0.25 ")


def given(name: str, *, kind: str = "input", nonfinite: int = 1, since: int | None = None) -> NonFiniteTensor:
    return NonFiniteTensor(name=name, kind=kind, nonfinite=nonfinite, elements=9, since=since)  # type: ignore[arg-type]


class TestOutside:
    def test_what_is_in_the_batch(self) -> None:
        text = explain_data([given("batch[0]"), given("batch['y']", nonfinite=4)], operation())
        assert text.startswith("Not finite in the batch: batch[0] (1 of 9 values), batch['y'] (4 of 9 values). ")
        assert "aten.mul.Tensor in net (train.py:3) is the first operation that takes them." in text

    def test_five_are_named(self) -> None:
        text = explain_data([given(f"batch[{place}]") for place in range(7)], operation())
        assert "batch[4]" in text
        assert "batch[5]" not in text

    def test_what_is_not_known_to_be_in_it(self) -> None:
        assert "aten.mul.Tensor in net (train.py:3)" in explain_data((), operation())

    def test_parameters_and_since_when(self) -> None:
        tensors = [
            given("head.weight", kind="parameter", nonfinite=9, since=7),
            given("norm.mean", kind="buffer"),
            given("a", kind="parameter", since=4),
        ]
        text = explain_parameters(tensors)
        assert "parameter head.weight (9 of 9 values), buffer norm.mean (1 of 9 values)" in text
        assert "They have been so since the update of step 4." in text
        assert "more" not in text

    def test_parameters_whose_beginning_is_not_known(self) -> None:
        text = explain_parameters([given(f"w{place}", kind="parameter") for place in range(8)])
        assert "since" not in text
        assert "w4 (1 of 9 values), and 3 more." in text

    def test_what_breaks_in_fp32_as_well(self) -> None:
        assert explain_model(operation("aten.log.default", nonfinite=2, nans=2)).endswith(" aten.log.default in net makes NaN there.")
        assert explain_model(None).endswith("another precision or loss scale will not help.")

    def test_what_one_trace_says(self) -> None:
        text = explain_witnessed(operation(nonfinite=2, given="inf", phase="backward"))
        assert text.startswith("aten.mul.Tensor in the backward pass of net makes 2 of 8 values infinite out of infinite values.")
        assert "not replayed" in text


class TestLosses:
    def test_of_accuracy(self) -> None:
        deviation = Deviation(error=1.2345, input_error=0.004, loss_error=0.1, gradient_error=0.8)
        text = explain_precision(pair(operation("aten.sub.Tensor", dtype="bfloat16")), 0, deviation)
        assert text.startswith(
            "aten.sub.Tensor in net differs by 123 % from the same in fp32, while what it is computed from differs by 0.4 % at most"
        )
        assert "what half precision has rounded before" in text
        assert "The loss differs by 10 %, the gradients by 80 %." in text

    @pytest.mark.parametrize(("scale", "told"), [(1.0, "without a loss scale"), (128.0, "at a loss scale of 128")])
    def test_of_gradients(self, scale: float, told: str) -> None:
        vanished = [VanishedGradients(module="a", zeros=30, elements=40), VanishedGradients(module="b", zeros=30, elements=60)]
        assert explain_underflow(vanished, scale=scale).startswith(f"In 2 modules gradients become zero {told}: 60 % of those that matter")
        assert explain_underflow(vanished[:1], scale=scale).startswith(f"In 1 module gradients become zero {told}: 75 % of")

    def test_of_updates(self) -> None:
        stuck = [
            StuckTensor(name="a", dtype="bfloat16", stuck=9, elements=10),
            StuckTensor(name="b", dtype="bfloat16", stuck=1, elements=10),
        ]
        assert explain_update(stuck).startswith("2 tensors in bf16: 50 % of the elements that would change in fp32 stay as they are")
        assert explain_update(stuck[:1]).startswith("1 tensor in bf16: 90 %")


class TestWording:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(65504.0, "65504"), (1.0, "1"), (999999.0, "999999"), (1e6, "1e+06"), (0.5, "0.5"), (1234.5678, "1234.57"), (0.0, "0")],
    )
    def test_amounts_have_six_digits_at_most(self, value: float, text: str) -> None:
        assert amount(value) == text

    def test_places(self) -> None:
        assert place_text(operation(phase="backward", module="")) == "in the backward pass of the model"
        assert operation_name(operation(module="a.b")) == "aten.mul.Tensor in a.b"
        assert operation_name(operation(module=UNKNOWN)) == "aten.mul.Tensor at train.py:3"
        assert operation_name(operation(module=UNKNOWN, phase="backward")) == "aten.mul.Tensor in the backward pass at train.py:3"
        assert operation_name(operation(module=UNKNOWN, file=UNKNOWN, line=0)) == "aten.mul.Tensor outside of all modules"

    @pytest.mark.parametrize(
        ("modules", "operations", "text"),
        [
            (["head"], [], "Run head in fp32."),
            (["a", "b", "c"], [], "Run a, b and c in fp32."),
            ([], ["mul"], "Run the operation mul in fp32."),
            (["head"], ["mul", "exp"], "Run head and the operations mul and exp in fp32."),
        ],
    )
    def test_islands(self, modules: list[str], operations: list[str], text: str) -> None:
        overrides = [
            *(Override(kind="module", pattern=each, precision="fp32") for each in modules),
            *(Override(kind="op", pattern=each, precision="fp32") for each in operations),
        ]
        assert island_text(overrides) == text
