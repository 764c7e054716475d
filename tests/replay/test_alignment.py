"""Two traces of one step, operation by operation, and how far results are from each other."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.numerics import OUTSIDE
from halfstep.records import OpRecord
from halfstep.replay.alignment import Pair, align, relative_error, relative_errors
from tests.replay.operations import detail, operation, run_of

ADD, MUL, CAST = "aten.add.Tensor", "aten.mul.Tensor", "aten._to_copy.default"


def ops(*names: str, **settings: int) -> list[OpRecord]:
    return [operation(name, **settings) for name in names]  # type: ignore[arg-type]


class TestAlign:
    def test_the_same_operations_in_the_same_order(self) -> None:
        assert align(ops(ADD, MUL, ADD), ops(ADD, MUL, ADD)) == [0, 1, 2]

    def test_calls_of_one_line_are_told_apart_by_their_order(self) -> None:
        assert align(ops(MUL, ADD, MUL), ops(ADD, MUL, MUL)) == [1, 0, 2]

    def test_what_ran_another_number_of_times_has_none(self) -> None:
        assert align(ops(MUL, CAST, ADD, CAST), ops(MUL, CAST, ADD)) == [0, None, 2, None]
        assert align(ops(MUL), []) == [None]
        assert align([], ops(MUL)) == []

    @pytest.mark.parametrize(
        "other",
        [
            operation(ADD),
            operation(module="other"),
            operation(line=4),
            operation(file="other.py"),
            operation(phase="backward"),
            operation(node="MulBackward0"),
        ],
    )
    def test_another_operation_place_or_phase_is_another(self, other: OpRecord) -> None:
        assert align([operation()], [other]) == [None]

    def test_dtypes_and_values_do_not_matter(self) -> None:
        assert align([operation(dtype="float16", nonfinite=3, absmax=inf)], [operation(dtype="float32")]) == [0]

    @given(st.lists(st.sampled_from([ADD, MUL, CAST]), max_size=8), st.lists(st.sampled_from([ADD, MUL, CAST]), max_size=8))
    def test_counterparts_are_the_same_operation_each_once_and_in_order(self, first: list[str], second: list[str]) -> None:
        found = align(ops(*first), ops(*second))
        pairs = [(place, other) for place, other in enumerate(found) if other is not None]
        assert all(first[place] == second[other] for place, other in pairs)
        assert len({other for _, other in pairs}) == len(pairs)
        for name in (ADD, MUL, CAST):
            others = [other for place, other in pairs if first[place] == name]
            assert others == sorted(others)
            assert len(others) == (first.count(name) if first.count(name) == second.count(name) else 0)


class TestRelativeError:
    @pytest.mark.parametrize(
        ("value", "reference", "error"),
        [
            ([1.0, 2.0], [1.0, 2.0], 0.0),
            ([3.0, 0.0], [0.0, 4.0], 1.25),
            ([0.0, 0.0], [0.0, 2.0], 1.0),
            ([1.0, 0.0], [0.0, 0.0], inf),
            ([0.0, 0.0], [0.0, 0.0], 0.0),
            ([inf, 1.0], [5.0, 2.0], 0.5),
            ([5.0, 1.0], [nan, 2.0], 0.5),
            ([nan], [1.0], 0.0),
            ([1.0], [1.0, 2.0], 0.0),
            ([], [], 0.0),
        ],
    )
    def test_it_is_that_of_the_finite_values(self, value: list[float], reference: list[float], error: float) -> None:
        assert relative_error(torch.tensor(value), torch.tensor(reference)) == error

    @pytest.mark.parametrize("size", [1e-300, 1e-160, 1.0, 1e160, 1e307])
    def test_no_square_overflows_or_vanishes(self, size: float) -> None:
        value, reference = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
        assert relative_error(value * size, reference * size) == pytest.approx(1.25)

    def test_many_at_once_are_those_one_by_one(self) -> None:
        pairs = [(torch.randn(size), torch.randn(size)) for size in (3, 1, 64, 0, 7)]
        pairs.append((torch.randn(2), torch.randn(3)))
        pairs.append((torch.randn(2, 3), torch.randn(2, 3, dtype=torch.float64)))
        assert relative_errors(pairs) == pytest.approx([relative_error(*each) for each in pairs])
        assert relative_errors([]) == []

    @given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=9))
    def test_it_is_the_norm_of_the_difference_over_that_of_the_reference(self, values: list[tuple[float, float]]) -> None:
        value, reference = torch.tensor(values, dtype=torch.float64).unbind(1)
        norm = torch.linalg.vector_norm(reference)
        if norm > 1e-100:
            expected = float(torch.linalg.vector_norm(value - reference) / norm)
            assert relative_error(value, reference) == pytest.approx(expected, rel=1e-6, abs=1e-12)


class TestPair:
    def pair(self) -> Pair:
        """A product that is right, a cast that ran in low precision alone, a sum that is wrong by a half, and what goes on with it."""
        low = run_of(
            (operation(MUL), detail(OUTSIDE, sample=[2.0])),
            (operation(CAST), detail(0, sample=[2.0])),
            (operation(ADD), detail(1, OUTSIDE, sample=[3.0])),
            (operation("aten.t.default"), detail(2, sample=None)),
            (operation("aten.exp.default"), detail(3, 0, sample=[9.0])),
        )
        full = run_of(
            (operation(ADD), detail(2, OUTSIDE, sample=[2.0])),
            (operation("aten.t.default"), detail(0, sample=None)),
            (operation(MUL), detail(OUTSIDE, sample=[2.0])),
            (operation("aten.exp.default"), detail(1, sample=[9.0])),
        )
        return Pair(low=low, full=full)

    def test_errors_are_those_of_counterparts(self) -> None:
        pair = self.pair()
        assert pair.counterparts == [2, None, 0, 1, 3]
        assert pair.errors == [0.0, None, pytest.approx(0.5), None, 0.0]

    def test_the_counterpart_is_an_operation_in_fp32(self) -> None:
        pair = self.pair()
        assert pair.counterpart(0) is pair.full.ops[2]
        assert pair.counterpart(1) is None

    def test_the_error_of_inputs_is_the_largest_and_looks_through_what_cannot_be_compared(self) -> None:
        pair = self.pair()
        assert [pair.input_error(index) for index in range(5)] == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.5])

    def test_what_writes_to_its_own_argument_ends(self) -> None:
        low = run_of((operation(CAST), detail(0, OUTSIDE, sample=None)), (operation(ADD), detail(0)))
        assert Pair(low=low, full=run_of()).input_error(1) == 0.0
