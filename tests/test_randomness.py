"""Generators that are put back, so that loops that take turns do not disturb each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigurationError
from halfstep.randomness import RandomState, seed_everything

Draw = Callable[[], list[float]]

DRAWS: dict[str, Draw] = {
    "python": lambda: [random.random() for _ in range(5)],
    "python gauss": lambda: [random.gauss(0, 1) for _ in range(3)],
    "numpy": lambda: np.random.rand(5).tolist(),
    "numpy normal": lambda: np.random.standard_normal(3).tolist(),
    "torch": lambda: torch.rand(5).tolist(),
    "torch normal": lambda: torch.randn(3).tolist(),
    "torch dropout": lambda: nn.functional.dropout(torch.ones(64)).tolist(),
}

every_generator = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


@every_generator
def test_the_same_seed_gives_the_same_draws(draw: Draw) -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert draw() != first


@every_generator
def test_a_restored_state_gives_the_same_draws(draw: Draw) -> None:
    draw()
    state = RandomState.capture()
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first
    state.restore()
    assert draw() == first, "a state can be restored more than once"


def test_all_generators_are_restored_together() -> None:
    state = RandomState.capture()
    first = {name: draw() for name, draw in DRAWS.items()}
    seed_everything(99)
    state.restore()
    assert {name: draw() for name, draw in DRAWS.items()} == first


@every_generator
def test_capturing_draws_nothing(draw: Draw) -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    RandomState.capture()
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        seed_everything(seed)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_both_ends_of_the_range_are_seeds(seed: int) -> None:
    seed_everything(seed)
    first = {name: draw() for name, draw in DRAWS.items()}
    seed_everything(seed)
    assert {name: draw() for name, draw in DRAWS.items()} == first


def test_states_are_told_apart_by_identity() -> None:
    state = RandomState.capture()
    assert state == state  # noqa: PLR0124 - comparing tensors and arrays for their truth would raise
    assert state != RandomState.capture()
    assert len({state, RandomState.capture()}) == 2


def loop(seed: int) -> Iterator[list[Tensor]]:
    """A training loop that draws from all three generators in each step, and pauses after each."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.01 * seed)
    while True:
        batch = torch.randn(4, 8) + random.random() + float(np.random.rand())
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        yield [parameter.detach().clone() for parameter in model.parameters()]


def alone(seed: int, *, steps: int) -> list[list[Tensor]]:
    seed_everything(seed)
    running = loop(seed)
    return [next(running) for _ in range(steps)]


def test_loops_that_take_turns_equal_loops_that_run_alone_bit_for_bit() -> None:
    steps, seeds = 6, (0, 1)
    expected = {seed: alone(seed, steps=steps) for seed in seeds}

    running, states = {}, {}
    for seed in seeds:
        seed_everything(seed)
        running[seed], states[seed] = loop(seed), RandomState.capture()
    taking_turns: dict[int, list[list[Tensor]]] = {seed: [] for seed in seeds}
    for turn in range(steps):
        for seed in seeds if turn % 2 else reversed(seeds):
            states[seed].restore()
            taking_turns[seed].append(next(running[seed]))
            states[seed] = RandomState.capture()

    for seed in seeds:
        for ours, theirs in zip(taking_turns[seed], expected[seed], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other)


def test_loops_that_take_turns_without_it_disturb_each_other() -> None:
    """Shows that the test above could fail."""
    expected = alone(0, steps=2)
    seed_everything(0)
    first, second = loop(0), loop(1)
    next(first)
    next(second)
    assert not all(map(torch.equal, next(first), expected[1]))


@pytest.mark.gpu
def test_cuda_generators_are_restored() -> None:
    torch.rand(1, device="cuda")
    state = RandomState.capture()
    assert len(state.cuda) == torch.cuda.device_count()
    first = torch.rand(5, device="cuda")
    state.restore()
    assert torch.equal(torch.rand(5, device="cuda"), first)


def test_without_cuda_no_cuda_state_is_kept() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    assert RandomState.capture().cuda == ()


@every_generator
def test_a_state_as_plain_values_is_the_same(draw: Draw, tmp_path: Path) -> None:
    seed_everything(5)
    draw()  # Such as the second of two normal numbers, which a generator keeps for the next call.
    torch.save(RandomState.capture().to_plain(), tmp_path / "state.pt")
    expected = [draw(), draw()]
    seed_everything(6)
    RandomState.from_plain(torch.load(tmp_path / "state.pt", weights_only=True)).restore()
    assert [draw(), draw()] == expected


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("python", [3, [1, 2], None]),
        ("python", None),
        ("numpy", ["MT19937", torch.zeros(3), 0, 0, 0.0]),
        ("cpu", torch.zeros(3, dtype=torch.uint8)),
        ("cuda", [torch.zeros(3)]),
        ("cuda", [None]),
    ],
)
def test_what_is_no_state_is_refused(entry: str, value: object) -> None:
    seed_everything(5)
    plain = {**RandomState.capture().to_plain(), entry: value}
    before = RandomState.capture().to_plain()
    with pytest.raises(ConfigurationError, match="no state of the random generators"):
        RandomState.from_plain(plain)
    assert repr(RandomState.capture().to_plain()) == repr(before)


def test_numpys_other_generators_cannot_be_kept() -> None:
    state = replace(RandomState.capture(), numpy={"bit_generator": "PCG64", "state": {}})
    with pytest.raises(ConfigurationError, match=r"is a PCG64, which cannot be put back\. Use MT19937"):
        state.to_plain()
