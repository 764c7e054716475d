from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import amp
from halfstep.errors import ConfigurationError

HALF, FULL = torch.float16, torch.float32


def seen(*values: Any, **named: Any) -> list[Any]:
    return [each.dtype if isinstance(each, Tensor) else each for each in (*values, *named.values())]


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, dtype=dtype)


def start(level: str = "O1", **arguments: Any) -> Any:
    return amp.initialize(nn.Linear(2, 2), opt_level=level, **arguments)


def test_functions_are_cast_after_initialize() -> None:
    half, full, promote = amp.half_function(seen), amp.float_function(seen), amp.promote_function(seen)
    mixed = (ones(HALF), ones(FULL), 3)
    assert half(*mixed) == full(*mixed) == promote(*mixed) == [HALF, FULL, 3]
    start()
    assert half(*mixed, c=ones(FULL)) == [HALF, HALF, 3, HALF]
    assert full(*mixed, c=ones(HALF)) == [FULL, FULL, 3, FULL]
    assert promote(*mixed, c=ones(HALF)) == [FULL, FULL, 3, FULL]
    assert promote(ones(HALF), ones(HALF)) == [HALF, HALF]
    assert promote(ones(HALF), ones(torch.bfloat16)) == [FULL, FULL]
    assert promote(ones(HALF), ones(torch.int64)) == [HALF, torch.int64]
    assert half(ones(torch.int64), ones(torch.float64)) == [torch.int64, torch.float64]
    assert half.__name__ == "seen"


@pytest.mark.parametrize(
    ("level", "arguments"),
    [("O0", {}), ("O2", {}), ("O3", {}), ("O1", {"enabled": False}), ("O1", {"patch_torch_functions": False})],
)
def test_without_o1_functions_are_left_alone(level: str, arguments: dict[str, Any]) -> None:
    start(level, **arguments)
    for mark in (amp.half_function, amp.float_function, amp.promote_function):
        assert mark(seen)(ones(HALF), ones(FULL)) == [HALF, FULL]


def test_what_half_is() -> None:
    start(cast_model_type=torch.bfloat16)
    assert amp.half_function(seen)(ones(FULL)) == [torch.bfloat16]


def test_gradients_come_back_in_the_dtype_of_the_arguments() -> None:
    start()
    weight = nn.Parameter(torch.tensor([3.0]))
    product = amp.half_function(torch.mul)(weight, torch.tensor([2.0]))
    assert product.dtype is HALF
    product.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.item()) == (FULL, 2.0)


def test_a_custom_autograd_function_inside_of_a_model() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype is FULL
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            assert gradient.dtype is FULL
            return gradient * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            assert hidden.dtype is HALF
            double: Callable[[Tensor], Tensor] = amp.float_function(Double.apply)
            result: Tensor = self.last(double(hidden))
            return result

    model = amp.initialize(Model(), opt_level="O1")
    model(torch.ones(1, 2)).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("after", [False, True])
def test_registered_functions_are_replaced(after: bool) -> None:
    module = SimpleNamespace(half=seen, full=seen, promote=seen)
    if after:
        start()
    amp.register_half_function(module, "half")
    amp.register_float_function(module, "full")
    amp.register_promote_function(module, "promote")
    mixed = (ones(HALF), ones(FULL))
    if not after:
        assert module.half is module.full is module.promote is seen
        start("O2")
        assert module.half is seen
        start()
    assert module.half(*mixed) == [HALF, HALF]
    assert module.full(*mixed) == module.promote(*mixed) == [FULL, FULL]
    start("O3")
    assert module.half(*mixed) == module.full(*mixed) == [HALF, FULL]


@pytest.mark.parametrize("register", [amp.register_half_function, amp.register_float_function, amp.register_promote_function])
def test_a_function_that_there_is_not(register: Callable[[Any, str], None]) -> None:
    with pytest.raises(ConfigurationError, match=r"There is no function 'sofmax' in torch.nn.functional"):
        register(nn.functional, "sofmax")
    with pytest.raises(ConfigurationError, match=r"There is no function 'pi' in torch"):
        register(torch, "pi")


def check_disabled(half: Callable[..., Any], a: Tensor) -> None:
    with amp.disable_casts():
        assert (a @ a).dtype is FULL
        assert half(a) == [FULL]
        with amp.disable_casts():
            assert half(a) == [FULL]
        assert half(a) == [FULL]
        raise KeyError


def test_casts_are_disabled_in_a_block_and_not_after_it() -> None:
    with amp.disable_casts():  # It may stand before amp.initialize.
        pass
    start()
    half = amp.half_function(seen)
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyError):
            check_disabled(half, a)
        assert (a @ a).dtype is torch.bfloat16
        assert half(a) == [HALF]
