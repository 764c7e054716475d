"""Random numbers that are drawn once and used again in another precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.numerics import Draws

HALF, FULL = torch.float16, torch.float32
Drawing = Callable[[torch.dtype], Tensor]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


DRAWN: dict[str, Drawing] = {
    "normal_": lambda dtype: torch.empty(40, dtype=dtype).normal_(1.0, 2.0),
    "uniform_": lambda dtype: torch.empty(40, dtype=dtype).uniform_(-3, 3),
    "exponential_": lambda dtype: torch.empty(40, dtype=dtype).exponential_(),
    "geometric_": lambda dtype: torch.empty(40, dtype=dtype).geometric_(0.3),
    "cauchy_": lambda dtype: torch.empty(40, dtype=dtype).cauchy_(),
    "log_normal_": lambda dtype: torch.empty(40, dtype=dtype).log_normal_(),
    "rand": lambda dtype: torch.rand(5, 8, dtype=dtype),
    "randn": lambda dtype: torch.randn(40, dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(torch.zeros(40, dtype=dtype)),
    "randn_like": lambda dtype: torch.randn_like(torch.zeros(40, dtype=dtype)),
    "normal": lambda dtype: torch.normal(torch.zeros(40, dtype=dtype), 2.0),
    "rand out": lambda dtype: torch.rand(40, out=torch.empty(40, dtype=dtype)),
    "bernoulli": lambda dtype: torch.bernoulli(torch.linspace(0, 1, 40).to(dtype)),
    "multinomial": lambda dtype: torch.multinomial(torch.linspace(0.1, 1, 40).to(dtype), 20),
    "poisson": lambda dtype: torch.poisson(torch.full((40,), 5.0, dtype=dtype)),
    "a view": lambda dtype: torch.zeros(8, 10, dtype=dtype)[:, ::2].normal_(),
    "0-d": lambda dtype: torch.empty((), dtype=dtype).normal_(),
    "empty": lambda dtype: torch.empty(0, dtype=dtype).normal_(),
    "several": lambda dtype: torch.cat([torch.randn(7, dtype=dtype), torch.rand(5, dtype=dtype), torch.randn(7, dtype=dtype)]),
    "gumbel": lambda dtype: F.gumbel_softmax(torch.linspace(0, 1, 40).to(dtype), hard=True),
}

# These are left alone: whether an element is kept is drawn in one way for all dtypes.
KEPT_ALIKE: dict[str, Drawing] = {
    "dropout": lambda dtype: F.dropout(torch.ones(1000, dtype=dtype), 0.5),
    "dropout2d": lambda dtype: F.dropout2d(torch.ones(5, 20, 2, 2, dtype=dtype), 0.5),
    "bernoulli_ of a number": lambda dtype: torch.empty(1000, dtype=dtype).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda dtype: torch.empty(256, dtype=dtype).bernoulli_(torch.linspace(0, 1, 256).to(HALF).to(dtype)),
    "attention": lambda dtype: attend(torch.ones(1, 2, 8, 4, dtype=dtype)),
    "random_ between bounds": lambda dtype: torch.empty(100, dtype=dtype).random_(0, 100),
    "randint": lambda dtype: torch.randint(0, 100, (100,), dtype=dtype),
}


def twice(draw: Drawing, *, first: torch.dtype = HALF, second: torch.dtype = FULL) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is drawn in one dtype and given in another, and the states of the generator after both."""
    draws, start = Draws(), torch.get_rng_state()
    with draws.taken():
        taken = draw(first)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    with draws.given():
        given = draw(second)
    return taken, given, after, torch.get_rng_state()


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("first", [HALF, torch.bfloat16])
def test_the_numbers_are_the_same_in_fp32(name: str, first: torch.dtype) -> None:
    taken, given, after, state = twice(DRAWN[name], first=first)
    assert given.dtype is (torch.int64 if name == "multinomial" else FULL)
    assert torch.equal(taken.to(given.dtype), given)
    assert torch.equal(after, state), "what is drawn afterwards is the same, too"


@pytest.mark.parametrize("name", ["normal_", "randn_like"])
def test_they_would_be_others_without(name: str) -> None:
    """So the tests above compare something that differs by itself."""
    start = torch.get_rng_state()
    low = DRAWN[name](HALF)
    torch.set_rng_state(start)
    assert not torch.equal(low, DRAWN[name](FULL).half())


@pytest.mark.parametrize("name", KEPT_ALIKE)
def test_what_is_drawn_alike_in_all_dtypes_is_the_same(name: str) -> None:
    taken, given, after, state = twice(KEPT_ALIKE[name])
    assert torch.allclose(taken.float(), given, rtol=2e-3)
    assert torch.equal(taken == 0, given == 0)
    assert torch.equal(after, state)


def test_whole_numbers_without_bounds_are_the_same() -> None:
    taken, given, _, _ = twice(lambda dtype: torch.empty(40, dtype=dtype).random_())
    assert torch.equal(taken.float(), given)


def test_half_may_be_given_what_fp32_drew() -> None:
    taken, given, after, state = twice(DRAWN["randn"], first=FULL, second=HALF)
    assert torch.equal(taken.half(), given)
    assert torch.equal(after, state)


def test_a_generator_of_the_code_is_put_where_it_was_and_no_other() -> None:
    generator = torch.Generator().manual_seed(3)
    start, other = generator.get_state(), torch.get_rng_state()
    draws = Draws()
    with draws.taken():
        taken = torch.randn(40, dtype=HALF, generator=generator)
    after = generator.get_state()
    generator.set_state(start)
    with draws.given():
        given = torch.empty(40).normal_(generator=generator)  # Another operation: it draws by itself.
    assert not torch.equal(taken.float(), given)
    generator.set_state(start)
    with draws.given():
        given = torch.randn(40, generator=generator)
    assert torch.equal(taken.float(), given)
    assert torch.equal(generator.get_state(), after)
    assert torch.equal(torch.get_rng_state(), other)


def test_what_is_drawn_beyond_what_was_noted_is_drawn_anew() -> None:
    draws = Draws()
    with draws.taken():
        torch.randn(6)
    state = torch.get_rng_state()
    with draws.given():
        torch.randn(6)
        more = torch.randn(6)
    torch.set_rng_state(state)
    assert torch.equal(more, torch.randn(6))


def test_another_number_of_values_is_drawn_anew() -> None:
    draws, start = Draws(), torch.get_rng_state()
    with draws.taken():
        torch.randn(6, dtype=HALF)
    torch.set_rng_state(start)
    expected = torch.randn(7)
    torch.set_rng_state(start)
    with draws.given():
        assert torch.equal(torch.randn(7), expected)


def test_they_are_given_as_often_as_one_wants() -> None:
    draws = Draws()
    with draws.taken():
        first = torch.randn(6, dtype=HALF)
    for _ in range(3):
        with draws.given():
            assert torch.equal(torch.randn(6), first.float())


def test_what_was_noted_before_is_forgotten_when_something_else_is() -> None:
    draws = Draws()
    with draws.taken():
        torch.randn(6)
    with draws.taken():
        second = torch.randn(6)
    with draws.given():
        assert torch.equal(torch.randn(6), second)


def test_later_writes_do_not_change_what_was_noted() -> None:
    draws = Draws()
    with draws.taken():
        drawn = torch.randn(6)
        before = drawn.clone()
        drawn.zero_()
    with draws.given():
        assert torch.equal(torch.randn(6), before)


def test_gradients_flow_through_what_is_given() -> None:
    mean = torch.zeros(6, requires_grad=True)
    draws = Draws()
    with draws.taken():
        first = torch.normal(mean, 1.0)
    with draws.given():
        second = mean + torch.normal(mean, 1.0).detach()
        second.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(first.detach(), second.detach())
    assert mean.grad is not None
    assert mean.grad.tolist() == [1.0] * 6


def test_a_model_with_noise_has_the_same_noise_in_both() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x + torch.randn_like(x), 0.5) + torch.rand_like(x)

    taken, given, after, state = twice(lambda dtype: Noisy()(torch.zeros(200, dtype=dtype)))
    assert torch.allclose(taken.float(), given, atol=1e-2)
    assert torch.equal(after, state)
