"""What a trace keeps of operations for a comparison: where arguments came from, a sample of the values, and the numbers among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.numerics import OUTSIDE, OperationDetail, trace
from halfstep.numerics.details import Details
from halfstep.numerics.operations import traits_of

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ADD: Any = torch.ops.aten.add.Tensor


def details_of(work: Callable[[], object], *, samples: int = 8) -> dict[str, OperationDetail]:
    """The details of each operation of some work, by name; of several with one name the last."""
    with trace(samples=samples) as seen:
        work()
    assert len(seen.details) == len(seen.ops)
    return {op.op.removeprefix("aten."): detail for op, detail in zip(seen.ops, seen.details, strict=True)}


def places_of(work: Callable[[], object]) -> list[tuple[str, tuple[int, ...]]]:
    """The name of each operation, and the sources of its arguments."""
    with trace(samples=4) as seen:
        work()
    return [(op.op.split(".")[1], detail.sources) for op, detail in zip(seen.ops, seen.details, strict=True)]


def sample_of(result: Tensor, *, size: int = 8) -> Tensor | None:
    """What is kept of the result of an operation."""
    details = Details(size)
    details.note(traits_of(ADD), [], [result], ())
    return details.noted[0].sample


class TestSamples:
    @pytest.mark.parametrize("shape", [(), (1,), (8,), (9,), (3, 5), (2, 3, 4, 5), (1, 100), (257,)], ids=str)
    @pytest.mark.parametrize("dtype", [HALF, BF16, FULL, DOUBLE, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
    def test_they_are_the_same_values_in_any_dtype(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = torch.Size(shape).numel()
        values = (torch.arange(count) % (2 if dtype is torch.bool else 101)).reshape(shape)
        low, full = sample_of(values.to(dtype)), sample_of(values.to(DOUBLE))
        assert low is not None
        assert full is not None
        assert low.numel() == min(count, 8)
        assert torch.equal(low.double(), full)

    @pytest.mark.parametrize("size", [1, 7, 64, 120, 500])
    def test_they_do_not_depend_on_strides(self, size: int) -> None:
        plain = torch.arange(120.0).reshape(4, 5, 6)
        expected = sample_of(plain, size=size)
        assert expected is not None
        others = [
            plain.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            plain.flip(0).flip(0),
            torch.stack([plain, plain], dim=-1)[..., 1],
            torch.arange(960.0).reshape(8, 10, 12).mul_(0).as_strided((4, 5, 6), (120, 12, 1)).copy_(plain),
        ]
        for other in others:
            sample = sample_of(other, size=size)
            assert sample is not None
            assert torch.equal(sample, expected)
        row = sample_of(torch.arange(6.0).expand(20, 6), size=size)
        copied = sample_of(torch.arange(6.0).expand(20, 6).contiguous(), size=size)
        assert row is not None
        assert copied is not None
        assert torch.equal(row, copied)

    def test_they_are_spread_over_the_whole_tensor(self) -> None:
        sample = sample_of(torch.arange(10_000.0), size=64)
        assert sample is not None
        assert len({*sample.tolist()}) == 64
        assert sample.min() < 300
        assert sample.max() > 9_700
        assert sample.sort().values.diff().max() < 300
        assert len({*(sample % 16).tolist()}) > 10, "no single column of a matrix"

    @pytest.mark.parametrize(
        ("dtype", "kept"),
        [(HALF, FULL), (BF16, FULL), (FULL, FULL), (torch.bool, FULL), (DOUBLE, DOUBLE), (torch.int64, DOUBLE), (torch.uint8, DOUBLE)],
    )
    def test_they_are_in_fp32_unless_that_loses_digits(self, dtype: torch.dtype, kept: torch.dtype) -> None:
        sample = sample_of(torch.ones(3, dtype=dtype))
        assert sample is not None
        assert sample.dtype is kept

    def test_digits_of_fp64_and_of_integers_are_kept(self) -> None:
        for value in (torch.tensor([1 + 2.0**-40], dtype=DOUBLE), torch.tensor([2**30 + 1])):
            sample = sample_of(value)
            assert sample is not None
            assert torch.equal(sample, value.double())

    @pytest.mark.parametrize(
        "result",
        [
            torch.zeros(0),
            torch.zeros(3, 0, 2),
            torch.ones(3, dtype=torch.complex64),
            torch.eye(3).to_sparse(),
            torch.ones(3, device="meta"),
        ],
        ids=["empty", "empty in one dimension", "complex", "sparse", "meta"],
    )
    def test_there_is_none_of_what_holds_no_real_numbers(self, result: Tensor) -> None:
        assert sample_of(result) is None

    def test_later_writes_do_not_change_them(self) -> None:
        x = torch.ones(3)

        def work() -> None:
            y = x * 2
            y.zero_()

        found = details_of(work)
        first, second = found["mul.Tensor"].sample, found["zero_.default"].sample
        assert first is not None
        assert second is not None
        assert (first.tolist(), second.tolist()) == ([2.0] * 3, [0.0] * 3)

    def test_views_and_unwritten_memory_have_none(self) -> None:
        found = details_of(lambda: (torch.ones(4).view(2, 2).t(), torch.empty(3)))
        assert found["ones.default"].sample is not None
        assert [found[name].sample for name in ("view.default", "t.default", "empty.memory_format")] == [None] * 3

    def test_it_is_of_the_first_result(self) -> None:
        sample = details_of(lambda: torch.tensor([1.0, 5.0, 3.0]).sort(descending=True))["sort.default"].sample
        assert sample is not None
        assert sample.tolist() == [5.0, 3.0, 1.0]

    def test_nothing_is_kept_unless_it_is_asked_for(self) -> None:
        with trace() as seen:
            torch.ones(2)
        assert len(seen.ops) == 1
        assert seen.details == ()


class TestSources:
    def test_what_no_operation_has_made_is_from_outside(self) -> None:
        x = torch.ones(2)
        assert places_of(lambda: x * x) == [("mul", (OUTSIDE, OUTSIDE))]

    def test_they_follow_results(self) -> None:
        x = torch.ones(2)

        def work() -> None:
            y, z = x * 2, x + 1
            torch.where(y > 0, z, y)

        assert places_of(work) == [("mul", (OUTSIDE,)), ("add", (OUTSIDE,)), ("gt", (0,)), ("where", (2, 1, 0))]

    def test_they_follow_views_to_what_was_computed(self) -> None:
        x = torch.ones(2, 3)

        def work() -> None:
            y = (x * 2).t()[1:].view(2, 2) + 1
            y.exp()

        assert places_of(work) == [("mul", (OUTSIDE,)), ("t", ()), ("slice", ()), ("view", ()), ("add", (0,)), ("exp", (4,))]

    def test_they_follow_casts(self) -> None:
        x = torch.ones(2)
        assert places_of(lambda: (x * 2).half() + 1) == [("mul", (OUTSIDE,)), ("_to_copy", (0,)), ("add", (1,))]

    def test_they_are_the_last_to_write_in_place(self) -> None:
        x = torch.ones(3)

        def work() -> None:
            y = x * 2
            y.add_(1)
            y[1:].mul_(0)
            y.exp()

        assert places_of(work) == [("mul", (OUTSIDE,)), ("add_", (0,)), ("slice", ()), ("mul_", (1,)), ("exp", (3,))]

    def test_what_takes_no_values_has_none_and_is_one(self) -> None:
        x = torch.ones(3)

        def work() -> None:
            y = torch.ones_like(x * 2)
            y.zero_()
            y.exp()

        assert places_of(work) == [("mul", (OUTSIDE,)), ("ones_like", ()), ("zero_", ()), ("exp", (2,))]

    def test_writes_to_what_is_from_outside_count(self) -> None:
        x = torch.ones(3)

        def work() -> None:
            x.mul_(2)
            x + 1

        assert places_of(work) == [("mul_", (OUTSIDE,)), ("add", (0,))]

    def test_writes_by_out_and_to_lists_count(self) -> None:
        x, y, target = torch.ones(2), torch.ones(2), torch.empty(2)

        def work() -> None:
            torch.add(x, y, out=target)
            torch._foreach_add_([x, y], 1.0)
            target + y

        found = places_of(work)
        assert found[0][0] == "add"
        assert found[1] == ("_foreach_add_", (OUTSIDE, OUTSIDE))
        assert found[2] == ("add", (0, 1))

    def test_all_results_of_one_operation_have_it_as_their_source(self) -> None:
        x = torch.ones(4)

        def work() -> None:
            values, indices = x.sort()
            values.gather(0, indices)

        found = places_of(work)
        assert found[-1] == ("gather", (0, 0))

    def test_they_go_through_the_backward_pass(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with trace(samples=4) as seen:
            x.exp().sum().backward()  # type: ignore[no-untyped-call]
        by_name = {op.op: detail.sources for op, detail in zip(seen.ops, seen.details, strict=True) if op.phase == "backward"}
        names = [op.op for op in seen.ops]
        assert by_name["aten.mul.Tensor"][1] == names.index("aten.exp.default"), "the result that was saved"

    def test_sparse_tensors_are_told_from_each_other(self) -> None:
        one, other = torch.eye(2).to_sparse(), torch.eye(2).to_sparse()

        def work() -> None:
            one * 2.0
            torch.sparse.sum(other)

        found = places_of(work)
        assert found[0] == ("mul", (OUTSIDE,))
        assert found[1][1][0] == OUTSIDE


class TestNumbers:
    @pytest.mark.parametrize(
        ("work", "numbers"),
        [
            (lambda x: x * 2.5, (2.5,)),
            (lambda x: x.clamp(min=-1.0, max=7.5), (-1.0, 7.5)),
            (lambda x: x.masked_fill(x > 0, -1e9), (-1e9,)),
            (lambda x: torch.full_like(x, 1e-9), (1e-9,)),
            (lambda x: torch.add(x, x, alpha=0.5), (0.5,)),
            (lambda x: x * 2, ()),
            (lambda x: x * x, ()),
        ],
    )
    def test_they_are_the_floats_among_the_arguments(self, work: Callable[[Tensor], object], numbers: tuple[float, ...]) -> None:
        x = torch.ones(2)
        with trace(samples=4) as seen:
            work(x)
        assert seen.details[-1].numbers == numbers
