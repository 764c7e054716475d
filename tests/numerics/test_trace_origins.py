"""Which operation a trace names as the origin, and how it knows that inputs are finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.numerics import finiteness, ranges
from halfstep.numerics.ranges import Ranges
from halfstep.numerics.tracing import Trace, trace
from halfstep.records.trace import OpRecord


@pytest.fixture(params=["at once", "later"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test as on a CPU, and as if all tensors were on a device that must not be waited for."""
    if request.param == "later":

        def measure(self: Ranges, tensor: Tensor) -> object:
            readable = tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()
            return self._measured_later(tensor) if readable else None

        monkeypatch.setattr(Ranges, "measure", measure)
        for module in (ranges, finiteness):
            monkeypatch.setattr(module, "reads_at_once", lambda tensor: False)
    mode: str = request.param
    return mode


def named(seen: Trace, op: str) -> OpRecord:
    (found,) = [each for each in seen.ops if each.op.startswith(f"aten.{op}")]
    return found


def origin(seen: Trace) -> str:
    return "" if seen.origin is None else seen.origin.op


def test_finite_plus_finite_that_overflows_in_fp16_is_an_origin() -> None:
    x = torch.tensor([40000.0, 1.0], dtype=torch.float16)
    with trace() as seen:
        y = x + x
        (y - y) * 0
    assert seen.origin is seen.ops[0]
    assert (seen.ops[0].absmax, seen.ops[0].nonfinite, seen.ops[0].nans) == (torch.inf, 1, 0)
    subtracted = seen.ops[1]
    assert (subtracted.nonfinite, subtracted.nans, subtracted.absmax) == (1, 1, 0.0)
    assert (subtracted.has_nonfinite_input, subtracted.has_nan_input) == (True, False)
    assert (seen.ops[2].has_nonfinite_input, seen.ops[2].has_nan_input) == (True, True)


def test_an_overflow_in_the_forward_pass_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model.get_parameter("1.weight"), 3e4)
    with trace(model) as seen, torch.autocast("cpu", dtype=torch.float16):
        model(torch.full((1, 4), 100.0)).float().sum().backward()
    assert seen.origin is not None
    assert (seen.origin.op, seen.origin.site.module, seen.origin.phase) == ("aten.addmm.default", "1", "forward")


def test_an_overflow_in_the_backward_pass_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("2.weight"), 100.0)
    with trace(model) as seen:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.zeros(1, 4))
        (out.float() * 60000.0).sum().backward()
    assert seen.origin is not None
    assert (seen.origin.op, seen.origin.site.module, seen.origin.phase) == ("aten.mm.default", "2", "backward")
    assert seen.origin.node == "AddmmBackward0"


def fill(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)


def add(x: Tensor) -> Tensor:
    return x + torch.full((3, 3), -torch.inf).triu(1)


def choose(x: Tensor) -> Tensor:
    return torch.where(torch.ones(3, 3, dtype=torch.bool).tril(), x, torch.tensor(-torch.inf))


@pytest.mark.parametrize("mask", [fill, add, choose])
def test_a_mask_of_infinities_is_no_origin(mask: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3, 3, requires_grad=True)
    with trace() as seen:
        mask(x).softmax(-1).pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert origin(seen) == ""
    assert any(each.nonfinite for each in seen.ops)
    assert not any(each.nans for each in seen.ops)


def test_the_softmax_of_a_row_that_is_masked_as_a_whole_is_the_origin_of_its_nans() -> None:
    x = torch.ones(2, 3)
    with trace() as seen:
        masked = x.masked_fill(torch.tensor([[True], [False]]), -torch.inf)
        masked.softmax(-1) * 2
    assert seen.origin is not None
    assert (seen.origin.op, seen.origin.nans) == ("aten._softmax.default", 3)
    assert seen.origin.has_nonfinite_input
    assert not seen.origin.makes_nonfinite


def test_a_batch_with_an_infinity_has_no_origin_until_it_makes_nan() -> None:
    batch = torch.tensor([[1.0, torch.inf]])
    with trace() as seen:
        batch * 2
    assert origin(seen) == ""
    assert seen.ops[0].has_nonfinite_input
    with trace() as seen:
        y = batch * 2
        y - y
    assert origin(seen) == "aten.sub.Tensor"


def test_a_parameter_that_is_not_finite_is_found_when_it_is_first_used() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with trace(model) as seen:
        model(torch.ones(1, 2))
    assert (named(seen, "addmm").has_nonfinite_input, named(seen, "addmm").has_nan_input) == (True, True)
    assert origin(seen) == ""


def test_numbers_among_the_arguments_count() -> None:
    x = torch.ones(2)
    with trace() as seen:
        x * torch.inf
        torch.full((2,), -torch.inf)
        x + float("nan")
        x.clamp(-1.0, 1.0)
    assert [each.has_nonfinite_input for each in seen.ops] == [True, True, True, False]
    assert [each.has_nan_input for each in seen.ops] == [False, False, True, False]


def test_what_is_overwritten_is_judged_before_and_after() -> None:
    x = torch.ones(2)
    with trace() as seen:
        x.fill_(torch.inf)
        x.mul_(2)
        x.zero_()
        x.mul_(2)
        x.add_(3e38).mul_(2)
    assert [each.has_nonfinite_input for each in seen.ops] == [True, True, True, False, False, False]
    assert seen.origin is seen.ops[-1]


def test_memory_that_was_freed_does_not_taint_what_takes_its_place() -> None:
    with trace() as seen:
        for _ in range(20):
            bad = torch.full((64,), torch.inf)
            del bad
            good = torch.zeros(64)
            good.exp()
            del good
    assert not any(each.has_nonfinite_input for each in seen.ops if each.op == "aten.exp.default")
    assert len(seen.ops) == 60


def test_a_part_of_memory_that_is_not_finite(reading: str) -> None:
    x = torch.ones(4)
    with trace() as seen:
        x[0].fill_(torch.inf)
        x[1:].exp()  # finite, and so known on a CPU
        x[:1].exp()
        x[1:].fill_(1.0)  # leaves the first as it is
        x.exp()
        x.fill_(1.0)
        x.exp()
    exact = [each.has_nonfinite_input for each in seen.ops if each.op == "aten.exp.default"]
    assert exact == [reading == "later", True, True, False]


def test_a_part_of_memory_from_outside_is_judged_by_itself() -> None:
    rows = torch.tensor([[1.0, torch.inf], [1.0, 1.0]])
    bad, good = rows[0], rows[1]
    with trace() as seen:
        good.exp()
        bad.exp()
        bad.zero_()
        bad.exp()
        good.exp()
    assert [each.has_nonfinite_input for each in seen.ops if each.op == "aten.exp.default"] == [False, True, False, False]


def test_a_sparse_gradient_that_is_not_finite_is_known_by_its_values() -> None:
    indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, torch.inf])
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False)
    with trace() as seen:
        torch.zeros(4).add_(sparse)
    assert named(seen, "add_").has_nonfinite_input


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(values=st.lists(st.floats(), min_size=1, max_size=30))
def test_counts_equal_those_of_numpy(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    with trace() as seen:
        y = x * 1
    numbers = y.double().numpy()
    (op,) = seen.ops
    assert (op.nonfinite, op.nans) == (int((~np.isfinite(numbers)).sum()), int(np.isnan(numbers).sum()))
    assert op.absmax == np.abs(numbers[~np.isnan(numbers)]).max(initial=0.0)
    given_numbers = x.double().numpy()
    assert op.has_nonfinite_input == bool((~np.isfinite(given_numbers)).any())
    assert op.has_nan_input == bool(np.isnan(given_numbers).any())


@pytest.mark.parametrize("result", [torch.float16, torch.bfloat16])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_what_casts_flush_equals_what_numpy_counts(result: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values)
    with trace() as seen:
        cast = x.to(result)
        torch.zeros_like(cast).copy_(x)
        cast.float()
    lost = int(((x.double().numpy() != 0) & (np.abs(cast.double().numpy()) < torch.finfo(result).tiny)).sum())
    flushed = [each.flushed for each in seen.ops if each.op in ("aten._to_copy.default", "aten.copy_.default")]
    assert flushed == [lost, lost, 0]
