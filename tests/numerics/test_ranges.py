"""The range of values, against what NumPy counts in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep._torch.tracing import untraced
from halfstep.numerics import ranges
from halfstep.numerics.ranges import FINITE, Extent, PendingReads, Ranges, covers_memory, dtype_name, narrows

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASTS = [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.bfloat16, torch.float16)]

# Around the borders of the formats: zeros, subnormal and smallest normal numbers, the largest ones, and what is not finite.
AWKWARD = [0.0, -0.0, 5e-324, 2.0**-149, 2.0**-133, 2.0**-126, 2.0**-25, 2.0**-24, 1.5 * 2.0**-25, 2.0**-14, 2.0**-14 * (1 - 2.0**-11)]
AWKWARD += [float(torch.finfo(dtype).smallest_normal * (1 - torch.finfo(dtype).eps)) for dtype in DTYPES]  # the largest subnormal ones
AWKWARD += [65504.0, 65519.0, 65520.0, 3.4e38, 1e39, math.inf, -math.inf, math.nan, -1.0]

values = st.lists(st.sampled_from(AWKWARD) | st.floats(width=32) | st.floats(), min_size=1, max_size=40)


def expected(tensor: Tensor) -> tuple[float, int, int]:
    numbers = tensor.double().numpy()
    there = np.abs(numbers[~np.isnan(numbers)])
    return float(there.max(initial=0.0)), int((~np.isfinite(numbers)).sum()), int(np.isnan(numbers).sum())


def lost(source: Tensor, result: Tensor) -> int:
    before, after = source.double().numpy(), result.double().numpy()
    return int(((before != 0) & (np.abs(after) < torch.finfo(result.dtype).tiny)).sum())


def numbers_of(reading: Any) -> tuple[float, int, int]:
    return (reading.absmax, reading.nonfinite, reading.nans) if isinstance(reading, Extent) else (reading, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=values)
def test_a_tensor_of_the_cpu_is_measured_exactly_and_at_once(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    with untraced():
        reading = Ranges().measure(tensor)
    assert numbers_of(reading) == expected(tensor)
    assert isinstance(reading, float) == (expected(tensor)[1] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=values)
def test_what_waits_on_a_device_gives_the_same_numbers_at_the_end(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    measure = Ranges()
    with untraced():
        extent = measure._measured_later(tensor)
        assert isinstance(extent.absmax, Tensor)
        assert extent.is_suspect
        measure.pending.settle()
    assert numbers_of(extent) == expected(tensor)


@pytest.mark.parametrize(("source", "result"), CASTS)
@pytest.mark.parametrize("repeats", [1, 3000])  # Few values and many are counted in different ways.
@given(values=values)
def test_what_a_cast_flushes_is_counted_exactly(source: torch.dtype, result: torch.dtype, repeats: int, values: list[float]) -> None:
    wide = torch.tensor(values, dtype=torch.float64).to(source).repeat(repeats)
    narrow = wide.to(result)
    with untraced():
        flush = Ranges().flushed(wide, narrow)
    assert (0 if flush is None else flush.count) == lost(wide, narrow)


@given(values=values)
def test_flushes_that_wait_are_counted_the_same(values: list[float]) -> None:
    wide = torch.tensor(values, dtype=torch.float32)
    measure = Ranges()
    with pytest.MonkeyPatch.context() as patch, untraced():
        patch.setattr(ranges, "reads_at_once", lambda tensor: False)
        flush = measure.flushed(wide, wide.half())
        measure.pending.settle()
    assert flush is not None
    assert flush.count == lost(wide, wide.half())


def test_a_source_that_is_repeated_in_the_result_counts_as_often() -> None:
    source = torch.tensor([1e-8, 0.0, 1.0])
    with untraced():
        flush = Ranges().flushed(source, torch.empty(4, 3, dtype=torch.float16).copy_(source))
    assert flush is not None
    assert flush.count == 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(0),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["integers", "truth values", "no elements", "no memory", "sparse", "8 bits"],
)
def test_what_has_no_values_to_read_is_left_out(tensor: Tensor) -> None:
    with untraced():
        assert Ranges().measure(tensor) is None


def test_a_complex_tensor_is_measured_by_its_parts() -> None:
    tensor = torch.tensor([complex(3, -4), complex(math.inf, 1)])
    with untraced():
        assert numbers_of(Ranges().measure(tensor)) == (math.inf, 1, 0)
        assert numbers_of(Ranges().measure(tensor[:1].conj())) == (4.0, 0, 0)


def test_two_extents_are_joined_by_their_counts() -> None:
    measure, one, other = Ranges(), Extent(math.inf, nonfinite=1, nans=0), Extent(1.0, nonfinite=2, nans=2)
    assert measure.join(FINITE, one) is one
    assert measure.join(one, FINITE) is one
    both = measure.join(one, other)
    assert (both.nonfinite, both.nans) == (3, 2)


def test_pending_reads_settle_once_and_leave_numbers_alone() -> None:
    reads, extent = PendingReads(), Extent(torch.tensor(2.0), nonfinite=torch.tensor(3), nans=0)
    for name in ("absmax", "nonfinite", "nans"):
        reads.add(extent, name)
    reads.settle()
    assert (extent.absmax, extent.nonfinite, extent.nans) == (2.0, 3, 0)
    extent.absmax = torch.tensor(5.0)
    reads.settle()
    assert isinstance(extent.absmax, Tensor)


def test_a_view_of_a_part_does_not_cover_the_memory() -> None:
    whole = torch.zeros(4, 4)
    assert covers_memory(whole)
    assert covers_memory(whole.t())
    assert not covers_memory(whole[1:])
    assert not covers_memory(torch.zeros(1, 4).expand(4, 4))
    assert not covers_memory(torch.zeros(4)[:1].expand(4))


def test_which_casts_narrow() -> None:
    assert [narrows(source, result) for source, result in CASTS] == [True] * len(CASTS)
    assert not any(narrows(result, source) for source, result in CASTS)
    assert not narrows(torch.float32, torch.int32)
    assert not narrows(torch.float16, torch.float16)


def test_a_dtype_is_named_as_records_name_it() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
