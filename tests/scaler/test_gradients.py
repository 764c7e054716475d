from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.scaler import LossScaler, check_finite_
from halfstep.scaler.gradients import collect_gradients, unscale_gradients_
from tests.scaler.loops import INF, NAN, HostReads, backward

REAL = [torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


def parameter(values: Any, *, gradient: Tensor | None = None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.as_tensor(values).to(dtype))
    made.grad = torch.ones_like(made) if gradient is None else gradient
    return made


def unscale(parameters: list[nn.Parameter], scale: float) -> float:
    """Divides the gradients by a scale, and returns the verdict."""
    found = torch.zeros(())
    unscale_gradients_(collect_gradients([{"params": parameters}]), scale=torch.tensor(scale), found_inf=found)
    return found.item()


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=8), scale=st.floats(2.0**-126, 2.0**127, width=32))
def test_unscaling_is_that_of_torch_bit_for_bit(values: list[float], scale: float) -> None:
    ours, theirs = parameter(values), parameter(values)
    ours.grad, theirs.grad = torch.tensor(values), torch.tensor(values)
    found = unscale([ours], scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([theirs], lr=1.0)
    scaler.unscale_(optimizer)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.view(torch.int32).tolist() == theirs.grad.view(torch.int32).tolist()
    assert found == float(not all(map(math.isfinite, values)))


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
def test_every_kind_of_number_is_unscaled_and_checked(dtype: torch.dtype, bad: float | None) -> None:
    weight = parameter([1.0, 2.0, 3.0], dtype=dtype)
    gradient = torch.tensor([8.0, 16.0, 24.0]).to(dtype)
    if dtype.is_complex:
        gradient = gradient + 8j
    if bad is not None:
        gradient[1] = complex(0.0, bad) if dtype.is_complex else bad  # type: ignore[assignment]
    weight.grad = gradient
    assert unscale([weight], 8.0) == float(bad is not None)
    assert gradient[0].item() == (1 + 1j if dtype.is_complex else 1)
    assert gradient[2].item() == (3 + 1j if dtype.is_complex else 3)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_are_unscaled_and_checked(coalesced: bool, bad: bool) -> None:
    weight = parameter(torch.ones(4, 2))
    values = torch.tensor([[8.0, 8.0], [16.0, INF if bad else 16.0]])
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4, 2), check_invariants=True)
    weight.grad = gradient.coalesce() if coalesced else gradient
    assert unscale([weight], 8.0) == float(bad)
    dense = weight.grad.to_dense()
    assert dense[0].tolist() == [1.0, 1.0]
    assert dense[2, 0].item() == 2.0


def test_an_embedding_with_sparse_gradients_trains() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    scaler, optimizer = LossScaler("cpu", init_scale=8.0), torch.optim.SparseAdam(embedding.parameters(), lr=0.5)
    for factor in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale((embedding(torch.tensor([1, 1, 3])) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    changed = (embedding.weight != before).any(dim=1)
    assert changed.tolist() == [False, True, False, True, False]
    assert embedding.weight.isfinite().all()
    assert (scaler.stats().skips, scaler.get_scale()) == (1, 4.0)


def test_all_gradients_are_taken_together_by_dtype() -> None:
    weights = [parameter([1.0]), parameter([1.0], dtype=torch.float64), parameter([1.0]), parameter([1.0], dtype=torch.complex64)]
    weights.append(nn.Parameter(torch.ones(1)))  # without a gradient
    weights.append(parameter(torch.ones(0)))
    collected = collect_gradients([{"params": weights[:2]}, {"params": weights[2:]}])
    cpu = torch.device("cpu")
    assert {key: len(tensors) for key, tensors in collected.items()} == {(cpu, torch.float32): 4, (cpu, torch.float64): 1}
    assert unscale(weights, 2.0) == 0.0
    assert [weight.grad.flatten().tolist() if weight.grad is not None else None for weight in weights] == [[0.5]] * 4 + [None, []]


@pytest.mark.parametrize("position", range(3))
def test_the_bad_gradient_may_be_anywhere(position: int) -> None:
    weights = [parameter([1.0]), parameter([1.0], dtype=torch.float64), parameter([1.0], dtype=torch.complex64)]
    weights[position].grad = torch.full_like(weights[position], NAN)
    assert unscale(weights, 8.0) == 1.0


def test_a_verdict_that_is_known_stays() -> None:
    found = torch.ones(())
    collected = collect_gradients([{"params": [parameter([1.0])]}])
    unscale_gradients_(collected, scale=torch.tensor(2.0), found_inf=found)
    check_finite_(collected, found_inf=found)
    assert found.item() == 1.0


def test_a_check_changes_no_gradient() -> None:
    weight = parameter([1.0, 2.0], gradient=torch.tensor([1.5, 1e-40]))
    found = torch.zeros(())
    check_finite_(collect_gradients([{"params": [weight]}]), found_inf=found)
    assert found.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.tolist() == torch.tensor([1.5, 1e-40]).tolist()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_of_a_gradient_is_unscaled_outside_of_the_graph() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    (weight**3 * 8).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert unscale([weight], 8.0) == 0.0
    assert weight.grad.tolist() == [12.0]
    weight.grad = None


def test_a_gradient_may_itself_require_one() -> None:
    gradient = torch.full((1,), 8.0, requires_grad=True)
    assert unscale([parameter([1.0], gradient=gradient)], 8.0) == 0.0
    assert gradient.item() == 1.0


def test_gradients_wait_for_no_device() -> None:
    weights = [parameter([1.0]), parameter([1.0], dtype=torch.complex64)]
    with HostReads() as reads:
        unscale(weights, 2.0)
    assert reads.total == 1, "only the read of this test itself"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_is_refused_with_the_parameter_and_the_remedy(dtype: torch.dtype) -> None:
    weights = [parameter([1.0]), nn.Parameter(torch.zeros(2, 3, dtype=dtype))]
    weights[1].grad = torch.zeros(2, 3, dtype=dtype)
    with pytest.raises(ConfigurationError, match=rf"parameter 1 of group 1, of shape \(2, 3\), is {dtype}\. .*model\.float\(\)"):
        collect_gradients([{"params": weights[:1]}, {"params": weights}])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_model_is_refused_by_name(dtype: torch.dtype, fused: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    optimizer = torch.optim.AdamW(model.named_parameters(), fused=fused)
    scaler = LossScaler("cpu")
    backward(scaler, model.parameters(), 1.0)
    with pytest.raises(ConfigurationError, match=r"parameter 2 of group 0, 1\.weight, of shape"):
        scaler.step(optimizer)
    assert not optimizer.state


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(InvalidTypeError, match="Parameter 1 of the optimizer's group 0 must be a tensor, not a str"):
        collect_gradients([{"params": [parameter([1.0]), "weight"]}])


@pytest.mark.gpu
def test_gradients_on_two_devices_share_a_verdict() -> None:
    weights = [parameter([1.0]), nn.Parameter(torch.ones(1, device="cuda"))]
    for bad, expected in ((1.0, 0.0), (NAN, 1.0)):
        weights[0].grad, weights[1].grad = torch.full((1,), 8.0), torch.full((1,), 8.0 * bad, device="cuda")
        assert unscale(weights, 8.0) == expected
        assert weights[0].grad.item() == 1.0
