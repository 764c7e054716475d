"""Which operation broke: where infinities begin, and whether they do harm."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.numerics import OUTSIDE
from halfstep.policy import Policy
from halfstep.replay.alignment import Pair
from halfstep.replay.faults import Faults, entering_fault, own_faults
from halfstep.replay.runs import Replay, Run, StepCode
from tests.replay.operations import detail, operation, run_of

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[[Tensor], Tensor]
READ = "aten._local_scalar_dense.default"


def pair_of(loss: Loss, *, scale: float = 1.0, weight: float = 1.0) -> Pair:
    """A step in fp16 and in fp32; the loss is computed from a parameter in fp32."""
    model = nn.ParameterDict({"weight": nn.Parameter(torch.full((4,), weight))})
    code = StepCode(model=model, parts=[(lambda: loss(model["weight"]), 1.0)])
    with Replay(code, device=torch.device("cpu")) as replay:
        policy = Policy.parse("fp16")
        return Pair(low=replay.traced(policy, scale=scale), full=replay.widened(policy))


def first(loss: Loss, *, weight: float = 1.0) -> str | None:
    """The name of the first operation of the forward pass that does harm."""
    pair = pair_of(loss, weight=weight)
    index = Faults(pair).first("forward")
    return None if index is None else pair.low.ops[index].op.split(".")[1]


class TestHarm:
    def test_an_infinity_that_reaches_the_loss_is_harmful(self) -> None:
        assert first(lambda w: (w.half() * 300 * 300).float().sum()) == "mul"

    def test_an_infinity_that_becomes_zero_is_harmful(self) -> None:
        """`rsqrt(inf)` is 0, and so is what it is multiplied with."""

        def loss(w: Tensor) -> Tensor:
            x = w.half() * 300
            return (x * (x * x).mean().rsqrt()).float().sum()

        pair = pair_of(loss)
        assert pair.low.is_finite
        assert pair.low.loss == 0.0
        index = Faults(pair).first("forward")
        assert index is not None
        assert pair.low.ops[index].op == "aten.mul.Tensor"
        assert pair.low.ops[index].nonfinite == 4

    def test_a_mask_of_infinity_is_not(self) -> None:
        def loss(w: Tensor) -> Tensor:
            mask = torch.tensor([0.0, 0.0, -math.inf, 0.0], dtype=torch.float16)
            return (w.half() + mask).softmax(0).float().square().sum()

        pair = pair_of(loss)
        assert any(op.nonfinite for op in pair.low.ops), "there is an infinity"
        faults = Faults(pair)
        assert (faults.first("forward"), faults.has_hidden) == (None, False)

    def test_a_constant_that_is_infinite_in_half_alone_is_not(self) -> None:
        """The softmax of -1e9 is as much zero as that of -inf."""

        def loss(w: Tensor) -> Tensor:
            mask = torch.tensor([0.0, 0.0, -1e9, 0.0]).to(torch.float16)
            return (w.half() + mask).softmax(0).float().square().sum()

        pair = pair_of(loss)
        faults = Faults(pair)
        assert faults.first("forward") is None
        assert faults.has_hidden, "samples alone tell that it does no harm"

    def test_two_such_constants_that_are_subtracted_are(self) -> None:
        def loss(w: Tensor) -> Tensor:
            mask = torch.full((4,), -1e9).half()
            return (w.half() + mask - mask).float().sum()

        assert first(loss) == "_to_copy"

    def test_a_row_that_is_masked_as_a_whole_is(self) -> None:
        def loss(w: Tensor) -> Tensor:
            return (w.half() + torch.full((4,), -1e9).half()).softmax(0).float().square().sum()

        assert first(loss) == "_to_copy"

    def test_nan_is_harmful_even_where_it_is_masked(self) -> None:
        def loss(w: Tensor) -> Tensor:
            x = w.half() * 300 * 300
            return torch.where((x - x).isnan(), 0, w.half()).float().sum()

        assert first(loss) == "mul"

    def test_a_number_that_python_reads_is_harmful(self) -> None:
        """`.item()` takes an infinity out of sight."""

        def loss(w: Tensor) -> Tensor:
            size = (w.detach().half() * 300 * 300).max().item()
            return w.sum() / size

        pair = pair_of(loss)
        assert pair.low.is_finite
        index = Faults(pair).first("forward")
        assert index is not None
        assert pair.low.ops[index].op == "aten.mul.Tensor"

    def test_what_nobody_uses_is_harmful(self) -> None:
        """Where a trace sees no further, code without operations of torch may."""

        def loss(w: Tensor) -> Tensor:
            w.detach().half() * 300 * 300
            return w.sum()

        assert first(loss) == "mul"

    def test_a_comparison_with_an_infinity_is_not_where_its_answer_is_right(self) -> None:
        def loss(w: Tensor) -> Tensor:
            is_large = (w.detach().half() * 300 * 300) > 1000
            return torch.where(is_large, w * 2, w).sum()

        assert first(loss) is None

    def test_an_index_of_the_smallest_is_harmful_where_all_are_infinite(self) -> None:
        """All distances are alike then, and the first is as near as any."""

        def loss(w: Tensor) -> Tensor:
            distances = torch.tensor([[9.0, 4.0, 2.0, 3.0]]).half() * w.detach().half() * 3e4
            return (w * F.one_hot(distances.argmin(1), 4)).sum()

        pair = pair_of(loss)
        index = Faults(pair).first("forward")
        assert index is None, "only one of two is infinite, and the smallest is not"
        assert first(lambda w: loss(w * 10)) == "mul"

    def test_what_turns_it_into_something_else_is_harmful_where_that_is_wrong(self) -> None:
        assert first(lambda w: (w.half() * 300 * 300).clamp(max=1e3).float().sum()) is None
        assert first(lambda w: (w.half() * 300 * 300).tanh().float().sum()) is None
        assert first(lambda w: (w.half() * 300 * 300).reciprocal().float().sum()) == "mul"

    def test_the_first_that_is_at_fault_is_found_behind_one_that_is_not(self) -> None:
        def loss(w: Tensor) -> Tensor:
            harmless = (w.half() + torch.tensor([0.0, 0.0, -1e9, 0.0]).half()).softmax(0)
            return (harmless * 600 * 600).float().sum()

        assert first(loss) == "mul"

    def test_what_is_finite_in_neither_is_meant_so(self) -> None:
        assert first(lambda w: torch.where(w > 2, (w.half() - w.half()).log(), 1.0).float().sum() + w.sum()) is None


class TestBackward:
    def test_every_infinity_is_harmful(self) -> None:
        pair = pair_of(lambda w: (w.half() * 300).float().sum() * 300, scale=1.0)
        assert Faults(pair).first("forward") is None
        index = Faults(pair).first("backward")
        assert index is not None
        assert (pair.low.ops[index].phase, pair.low.ops[index].op) == ("backward", "aten.mul.Tensor")
        assert not Faults(pair).has_hidden

    def test_it_begins_where_it_overflows_first(self) -> None:
        pair = pair_of(lambda w: ((w.half() * 2) * 300).float().sum() * 2.0**8)
        index = Faults(pair).first("backward")
        assert index is not None
        nodes = [op for op in pair.low.ops if op.phase == "backward" and op.nonfinite]
        assert pair.low.ops[index] is nodes[0]


class TestByHand:
    """What is not finite, told without running anything."""

    def faults(self, low: Run, full: Run) -> Faults:
        return Faults(Pair(low=low, full=full))

    def test_more_that_is_not_finite_than_in_fp32_is_a_fault(self) -> None:
        full = run_of((operation(nonfinite=2), detail(OUTSIDE)))
        assert self.faults(run_of((operation(nonfinite=2), detail(OUTSIDE))), full).first("forward") is None
        assert self.faults(run_of((operation(nonfinite=3), detail(OUTSIDE))), full).first("forward") == 0
        assert self.faults(run_of((operation(nonfinite=2, nans=1), detail(OUTSIDE))), full).first("forward") == 0

    def test_without_a_counterpart_anything_is(self) -> None:
        assert self.faults(run_of((operation(nonfinite=1), detail(OUTSIDE))), run_of()).first("forward") == 0
        assert self.faults(run_of((operation(), detail(OUTSIDE))), run_of()).first("forward") is None

    @pytest.mark.parametrize(("error", "harm"), [(0.09, None), (0.11, 0)])
    def test_what_hides_it_is_harmful_from_a_tenth(self, error: float, harm: int | None) -> None:
        hiding = operation("aten.tanh.default", given="inf")
        low = run_of((operation(nonfinite=1), detail(OUTSIDE)), (hiding, detail(0, sample=[1 + error])))
        full = run_of((operation(), detail(OUTSIDE)), (operation("aten.tanh.default"), detail(0, sample=[1.0])))
        assert self.faults(low, full).first("forward") == harm

    def test_a_wrong_value_without_an_infinity_among_its_arguments_hides_nothing(self) -> None:
        wrong = operation("aten.tanh.default")
        low = run_of((operation(nonfinite=1), detail(OUTSIDE)), (wrong, detail(0, sample=[2.0])))
        full = run_of((operation(), detail(OUTSIDE)), (wrong, detail(0, sample=[1.0])))
        assert self.faults(low, full).first("forward") is None

    def test_in_the_backward_pass_it_is_harmful_whatever_becomes_of_it(self) -> None:
        low = run_of((operation(nonfinite=1, phase="backward"), detail(OUTSIDE)), (operation(phase="backward", given="inf"), detail(0)))
        assert self.faults(low, run_of()).first("backward") == 0
        assert own_faults(low) == 0
        forward = run_of((operation(nonfinite=1), detail(OUTSIDE)), (operation(given="inf"), detail(0)))
        assert self.faults(forward, run_of()).first("forward") is None
        assert own_faults(forward) is None

    def test_it_is_followed_to_its_origin(self) -> None:
        low = run_of(
            (operation("a.b.c"), detail(OUTSIDE)),
            (operation(nonfinite=1), detail(0)),
            (operation("aten.exp.default", nonfinite=1, given="inf"), detail(1)),
            (operation("aten.sub.Tensor", nonfinite=1, nans=1, given="inf"), detail(2)),
        )
        assert self.faults(low, run_of()).first("forward") == 1


def traced(loss: Loss, *, weight: float = 1.0) -> Run:
    return pair_of(loss, weight=weight).low


class TestOwnFaults:
    def test_the_first_that_reaches_an_end(self) -> None:
        low = traced(lambda w: (w.half() * 300 * 300).float().sum())
        index = own_faults(low)
        assert index is not None
        assert low.ops[index].op == "aten.mul.Tensor"

    def test_a_mask_reaches_none(self) -> None:
        assert own_faults(traced(lambda w: (w + torch.tensor([-1e9, 0, 0, 0]).half()).softmax(0).square().sum())) is None

    def test_what_is_read_reaches_one(self) -> None:
        low = run_of((operation(nonfinite=1), detail(OUTSIDE)), (operation(READ, given="inf", dtype=""), detail(0)))
        assert own_faults(low) == 0

    def test_what_makes_nan_of_infinities_where_nothing_made_these(self) -> None:
        mask = torch.full((4,), -math.inf)
        low = traced(lambda w: (w + mask).softmax(0).sum())
        index = own_faults(low)
        assert index is not None
        assert low.ops[index].op == "aten._softmax.default"

    def test_a_clean_run_has_none(self) -> None:
        assert own_faults(traced(lambda w: w.sum())) is None


class TestEnteringFault:
    def test_nan_from_outside(self) -> None:
        batch = torch.tensor([1.0, math.nan, 1.0, 1.0])
        run = traced(lambda w: (w * 2 * batch).sum())
        index = entering_fault(run)
        assert index is not None
        assert run.ops[index].op == "aten.mul.Tensor"
        assert run.ops[index].has_nan_input
        assert run.details[index].sources.count(OUTSIDE) == 1

    def test_a_parameter_that_is_not_finite(self) -> None:
        run = traced(lambda w: (w * 2).sum(), weight=math.inf)
        assert entering_fault(run) == 0

    @pytest.mark.parametrize(
        "loss",
        [
            lambda w: (w.masked_fill(torch.tensor([True, False, False, False]), -math.inf) + 0.0).softmax(0).square().sum(),
            lambda w: w.masked_fill(torch.tensor([True, False, False, False]), -math.inf).sum(),
            lambda w: torch.full((4,), -math.inf).maximum(w).sum(),
            lambda w: torch.full((4,), math.inf).sum() + w.sum(),
        ],
    )
    def test_infinities_among_the_numbers_of_the_code_are_not_from_outside(self, loss: Loss) -> None:
        assert entering_fault(traced(loss)) is None

    def test_a_mask_from_outside_that_does_no_harm_is_none(self) -> None:
        mask = torch.tensor([-math.inf, 0.0, 0.0, 0.0])
        assert entering_fault(traced(lambda w: (w + mask).softmax(0).square().sum())) is None

    def test_what_the_step_made_itself_is_none(self) -> None:
        assert entering_fault(traced(lambda w: (w * 1e38 * 1e38).sum())) is None


def test_consumers_are_the_operations_that_were_given_a_result() -> None:
    run = run_of((operation(), detail(OUTSIDE)), (operation(), detail(0, 0)), (operation(), detail(0, 1, OUTSIDE)))
    assert dict(run.consumers) == {0: [1, 2], 1: [2]}
