"""Casts, counted where they can be counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.numerics import CastCounter


def step(model: nn.Module, x: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> CastCounter:
    with CastCounter() as counter:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).sum()
        loss.backward()
    return counter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_layer_casts_input_and_weights_and_their_gradients_back(dtype: torch.dtype) -> None:
    counter = step(nn.Linear(3, 2), torch.ones(4, 3), dtype=dtype)
    # Forward: the input (12 elements), the weight (6) and the bias (2). Backward: the gradients of weight and bias; the input needs none.
    assert (counter.casts, counter.elements) == (3 + 2, 12 + 6 + 2 + 6 + 2)


def test_the_gradient_of_an_input_that_needs_one_is_cast_too() -> None:
    counter = step(nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True))
    assert (counter.casts, counter.elements) == (3 + 3, 2 * (12 + 6 + 2))


def test_a_second_layer_takes_the_output_of_the_first_as_it_is() -> None:
    assert step(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(4, 3)).casts == 1 + 2 * 4


def test_other_dtypes_and_copies_that_change_none_are_no_casts() -> None:
    x = torch.ones(3)
    with CastCounter() as counter:
        x.to(torch.float64)
        x.to(torch.int32)
        x.bool()
        x.to(torch.float32, copy=True)
        x.clone()
    assert (counter.casts, counter.elements) == (0, 0)
    with counter:
        x.to(torch.float16).to(torch.bfloat16).float()
    assert (counter.casts, counter.elements) == (3, 9)


def test_nothing_is_counted_after_the_end_even_of_one_that_broke_off() -> None:
    counter = CastCounter()
    with pytest.raises(ValueError, match="stop"), counter:
        raise ValueError("stop")
    torch.ones(3).half()
    assert counter.casts == 0
