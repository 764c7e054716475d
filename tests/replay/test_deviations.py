"""Where a step in low precision goes away from that in fp32, although all of it is finite."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from halfstep.numerics import OUTSIDE, OperationDetail
from halfstep.records import OpRecord, VanishedGradients
from halfstep.replay.alignment import Pair
from halfstep.replay.deviations import Deviations, vanished_gradients
from tests.replay.operations import detail, operation, run_of

Step = tuple[OpRecord, OperationDetail]


def chain(*errors: float | None, given: float = 0.0, ends: int = 3) -> Pair:
    """Operations that compute with each other, the first from something with an error; each differs from fp32 by so much of its size."""
    low: list[Step] = [(operation("aten.first.default"), detail(OUTSIDE, sample=[1 + given]))]
    full: list[Step] = [(operation("aten.first.default"), detail(OUTSIDE, sample=[1.0]))]
    everything = [*errors, *([errors[-1]] * ends)]
    for place, error in enumerate(everything):
        op = operation(f"aten.op{place}.default")
        low.append((op, detail(place, sample=None if error is None else [1 + error])))
        full.append((op, detail(place, sample=None if error is None else [1.0])))
    return Pair(low=run_of(*low), full=run_of(*full))


def found(pair: Pair) -> list[int]:
    return list(Deviations(pair).jumps())


class TestJumps:
    @pytest.mark.parametrize(("error", "jumps"), [(0.19, []), (0.21, [1]), (5.0, [1])])
    def test_a_fifth_of_its_norm_is_a_loss(self, error: float, jumps: list[int]) -> None:
        assert found(chain(error)) == jumps

    @pytest.mark.parametrize(("given", "jumps"), [(0.0, [1]), (0.05, [1]), (0.061, [])])
    def test_what_it_was_computed_from_was_much_closer(self, given: float, jumps: list[int]) -> None:
        assert found(chain(0.3, given=given)) == jumps

    @pytest.mark.parametrize(("ends", "jumps"), [(2, []), (3, [1])])
    def test_three_operations_compute_with_it(self, ends: int, jumps: list[int]) -> None:
        assert found(chain(0.3, ends=ends)) == jumps

    def test_those_count_that_have_half_of_the_limit_left(self) -> None:
        assert found(chain(0.3, 0.11, 0.11, 0.11, ends=0)) == [1]
        assert found(chain(0.3, 0.09, 0.11, 0.11, ends=0)) == []

    def test_what_cannot_be_compared_is_looked_through_and_not_counted(self) -> None:
        assert found(chain(0.3, None, 0.3, 0.3, 0.3, ends=0)) == [1]
        assert found(chain(0.3, None, 0.3, 0.3, ends=0)) == []

    def test_each_jump_is_told(self) -> None:
        assert found(chain(0.25, 3.0)) == [1, 2]

    def test_neither_the_backward_pass_nor_what_has_no_numbers_jumps(self) -> None:
        for op in (operation("aten.op0.default", phase="backward"), operation("aten.op0.default", elements=0, dtype="int64")):
            pair = chain(0.3)
            low, full = ([*zip(run.ops, run.details, strict=True)] for run in (pair.low, pair.full))
            for steps in (low, full):
                steps[1] = op, steps[1][1]
            assert found(Pair(low=run_of(*low), full=run_of(*full))) == []

    def test_a_loop_ends(self) -> None:
        step = (operation("aten.op.default"), detail(0, sample=[2.0]))
        assert found(Pair(low=run_of(step), full=run_of((step[0], detail(0, sample=[1.0]))))) == []

    def test_what_is_said_of_one(self) -> None:
        deviation = Deviations(chain(0.5, given=0.0625)).at(1)
        assert [deviation.error, deviation.input_error] == pytest.approx([0.5, 0.0625])
        assert (deviation.loss_error, deviation.gradient_error) == (0.0, 0.0)


def harm(
    *,
    loss: float = 1.0,
    reference: float = 1.0,
    gradients: dict[str, list[float]] | None = None,
    references: dict[str, list[float]] | None = None,
    scale: float = 1.0,
) -> Deviations:
    def tensors(values: dict[str, list[float]] | None) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in (values or {}).items()}

    return Deviations(
        Pair(low=run_of(loss=loss, gradients=tensors(gradients), scale=scale), full=run_of(loss=reference, gradients=tensors(references)))
    )


class TestHarm:
    @pytest.mark.parametrize(("loss", "amount"), [(1.0, 0.0), (1.02, 1.0), (0.98, 1.0), (1.2, 10.0)])
    def test_a_loss_may_differ_by_two_percent(self, loss: float, amount: float) -> None:
        deviations = harm(loss=loss)
        assert deviations.harm == pytest.approx(amount)
        assert deviations.loss_error == pytest.approx(amount / 50)

    def test_a_loss_that_should_be_zero_and_is_not(self) -> None:
        assert harm(loss=1e-3, reference=0.0).harm == inf
        assert harm(loss=0.0, reference=0.0).harm == 0.0

    @pytest.mark.parametrize(("value", "amount"), [(1.0, 0.0), (1.3, 1.0), (0.4, 2.0)])
    def test_gradients_may_differ_by_three_tenths(self, value: float, amount: float) -> None:
        deviations = harm(gradients={"w": [value]}, references={"w": [1.0]})
        assert deviations.harm == pytest.approx(amount, abs=1e-6)
        assert deviations.gradient_error == pytest.approx(0.3 * amount, abs=1e-6)

    def test_gradients_are_compared_without_the_scale(self) -> None:
        assert harm(gradients={"w": [1024.0, 2048.0]}, references={"w": [1.0, 2.0]}, scale=1024.0).harm == 0.0

    def test_the_worst_parameter_counts_and_the_error_is_of_all(self) -> None:
        deviations = harm(gradients={"a": [3.0], "b": [4.0], "c": [1.0]}, references={"a": [3.0], "b": [4.0], "c": [2.0]})
        assert deviations.harm == pytest.approx(0.5 / 0.3)
        assert deviations.gradient_error == pytest.approx(1 / 29**0.5)

    def test_gradients_that_are_small_in_the_whole_model_matter_little(self) -> None:
        """The size that is compared with is a tenth of the root mean square of all."""
        deviations = harm(gradients={"a": [1.0], "b": [1e-4]}, references={"a": [1.0], "b": [-1e-4]})
        assert deviations.harm == pytest.approx(2e-4 / (0.1 * 0.5**0.5) / 0.3, rel=1e-4)

    def test_without_gradients_there_is_no_error(self) -> None:
        assert harm(references={"w": [0.0]}, gradients={"w": [1.0]}).harm == 0.0
        assert harm().gradient_error == 0.0

    def test_sparse_gradients_and_those_of_one_run_alone_are_left_aside(self) -> None:
        sparse = torch.eye(2).to_sparse()
        low = run_of(gradients={"sparse": sparse, "other": torch.ones(2)})
        full = run_of(gradients={"sparse": sparse * 7, "another": torch.ones(2)})
        assert Deviations(Pair(low=low, full=full)).harm == 0.0


def vanished(low: dict[str, Tensor], full: dict[str, Tensor]) -> tuple[VanishedGradients, ...]:
    return vanished_gradients(run_of(gradients=low), run_of(gradients=full))


def with_zeros(zeros: int, *, of: int = 20) -> Tensor:
    values = torch.ones(of)
    values[:zeros] = 0
    return values


class TestVanished:
    @pytest.mark.parametrize(("zeros", "counts"), [(0, False), (10, False), (11, True), (20, True)])
    def test_it_is_more_than_half(self, zeros: int, counts: bool) -> None:
        found = vanished({"head.weight": with_zeros(zeros)}, {"head.weight": torch.ones(20)})
        assert found == ((VanishedGradients(module="head", zeros=zeros, elements=20),) if counts else ())

    @pytest.mark.parametrize(("elements", "counts"), [(15, False), (16, True)])
    def test_it_is_of_sixteen_at_least(self, elements: int, counts: bool) -> None:
        assert bool(vanished({"w": torch.zeros(elements)}, {"w": torch.ones(elements)})) == counts

    def test_parameters_of_one_module_count_together(self) -> None:
        low = {"a.b.weight": torch.zeros(8), "a.b.bias": torch.zeros(8), "weight": torch.zeros(20)}
        full = {name: torch.full_like(value, 1e-9) for name, value in low.items()}
        assert [(each.module, each.elements) for each in vanished(low, full)] == [("", 20), ("a.b", 16)]

    def test_the_largest_share_comes_first(self) -> None:
        low = {"a.w": with_zeros(15), "b.w": with_zeros(20), "c.w": with_zeros(18), "d.w": torch.zeros(40)}
        full = {name: torch.ones_like(value) for name, value in low.items()}
        assert [each.module for each in vanished(low, full)] == ["d", "b", "c", "a"]

    def test_what_is_negligible_in_fp32_does_not_count(self) -> None:
        full = torch.cat([torch.ones(20), torch.full((80,), 4e-4)])
        low = torch.where(full < 1, 0.0, full)
        assert vanished({"w": low}, {"w": full}) == ()
        (found,) = vanished({"w": low}, {"w": torch.cat([torch.ones(20), torch.full((80,), 6e-4)])})
        assert (found.zeros, found.elements) == (80, 100)

    def test_zeros_of_fp32_do_not_count(self) -> None:
        assert vanished({"w": torch.zeros(20)}, {"w": torch.zeros(20)}) == ()
        assert vanished({"w": torch.zeros(40)}, {"w": torch.cat([torch.ones(10), torch.zeros(30)])}) == ()

    def test_the_scale_does_not_matter(self) -> None:
        low = run_of(gradients={"w": torch.zeros(20)}, scale=1024.0)
        assert vanished_gradients(low, run_of(gradients={"w": torch.full((20,), 1e-30)})) != ()

    def test_sparse_gradients_and_those_of_one_run_alone_are_left_aside(self) -> None:
        sparse = torch.eye(20).to_sparse()
        assert vanished({"sparse": sparse * 0, "w": torch.zeros(20)}, {"sparse": sparse, "v": torch.ones(20)}) == ()

    def test_gradients_in_half_are_measured_in_fp64(self) -> None:
        full = torch.full((20,), 6e4, dtype=torch.float16)
        assert vanished({"w": torch.zeros(20, dtype=torch.float16)}, {"w": full}) != ()
