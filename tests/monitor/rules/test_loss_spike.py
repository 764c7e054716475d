from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules import LossSpike
from halfstep.monitor.rules.loss_spike import _median_distance
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = LossSpike()


def noisy(count: int, level: float = 2.0, *, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [level + generator.gauss(0, 0.05) for _ in range(count)]


def test_a_single_huge_loss_is_told() -> None:
    (alert,) = verdicts(RULE, each("loss", [*noisy(200), 9.0, *noisy(200)]))
    assert alert.step == 201
    assert "jumped to 9: the median of the 100 before is 2.0" in alert.message
    assert "robust standard deviation of 0.0" in alert.message
    assert "clip_grad_norm_" in alert.advice


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e9, -1.0], ids=str)
def test_several_high_losses_in_a_row_are_told_once(scale: float) -> None:
    jump = [*noisy(200), *noisy(60, 2.0 + math.copysign(0.7, scale)), *noisy(100)]
    (alert,) = verdicts(RULE, each("loss", [scale * loss for loss in jump]))
    assert alert.step == 203
    assert ", and has been high for 3 steps in a row: the median" in alert.message


def test_thirty_losses_are_enough_and_fewer_are_not() -> None:
    assert steps_of(RULE, each("loss", [*noisy(30), 50.0])) == [31]
    assert steps_of(RULE, each("loss", [*noisy(28), 50.0])) == []
    assert steps_of(RULE, each("loss", [*noisy(25), *[math.nan, math.inf] * 20, *[50.0] * 3])) == []


def test_a_climb_over_a_few_steps_does_not_escape() -> None:
    assert len(steps_of(RULE, each("loss", [*noisy(200), *(2.0 * 1.1**n for n in range(40))]))) == 1


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([1.0] * 300, id="all equal"),
        pytest.param([*[1.0] * 100, *[1.9] * 100], id="equal, then a little more"),
        pytest.param([0.0] * 300, id="zero"),
        pytest.param([*[0.0] * 100, *[0.5] * 100], id="zero, then not"),
        pytest.param([-2.0 - 0.01 * n for n in range(300)], id="negative and falling"),
        pytest.param([100 * 0.98**n for n in range(1000)], id="falling"),
        pytest.param([2.0 + 0.01 * n for n in range(500)], id="rising slowly"),
        pytest.param([*noisy(200), 2.9, 2.0, 2.9, *noisy(50)], id="two that are somewhat high"),
        pytest.param([*noisy(200), *[2.3] * 10, *noisy(50)], id="within deviations"),
        pytest.param([5.0 if n % 10 in {3, 4, 5} else 0.1 for n in range(1000)], id="two tasks"),
        pytest.param([2.0 * math.exp(-n / 20) + 1e-3 * (n % 97 == 0) for n in range(1000)], id="near zero"),
        pytest.param([math.nan, math.inf, -math.inf] * 200, id="not finite"),
        pytest.param([1e308, -1e308] * 200, id="huge"),
    ],
)
def test_no_alert(losses: list[float]) -> None:
    assert steps_of(RULE, each("loss", losses)) == []


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda g: 1 + g.gauss(0, 1), id="normal"),
        pytest.param(lambda g: g.expovariate(1), id="exponential"),
        pytest.param(lambda g: g.lognormvariate(0, 0.7), id="lognormal"),
        pytest.param(lambda g: g.gammavariate(0.5, 1), id="gamma"),
        pytest.param(lambda g: round(2 + g.gauss(0, 0.01), 2), id="coarse"),
        pytest.param(lambda g: 5 + g.gauss(0, 1) / math.sqrt(g.gammavariate(2.5, 0.4)), id="student, 5 degrees"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_ordinary_noise_is_no_spike(draw: Callable[[random.Random], float], seed: int) -> None:
    generator = random.Random(seed)
    assert steps_of(RULE, each("loss", [draw(generator) * (0.2 + math.exp(-n / 500)) for n in range(2000)])) == []


def test_a_loss_that_is_always_the_same_may_double() -> None:
    assert steps_of(RULE, each("loss", [*[1.0] * 100, 2.5])) == [101]


def test_a_new_level_becomes_the_usual_one_and_arms_it_again() -> None:
    assert steps_of(RULE, each("loss", [*noisy(200), *noisy(300, 4.0), *noisy(5, 8.0)])) == [201, 501]


def test_spikes_close_to_each_other_are_one() -> None:
    assert steps_of(RULE, each("loss", [*noisy(200), 9.0, *noisy(5), 99.0, *noisy(50), 99.0])) == [201]
    assert steps_of(RULE, each("loss", [*noisy(200), 9.0, *noisy(150), 9.0])) == [201, 352]


def test_a_row_is_broken_by_an_ordinary_loss_and_not_by_an_unknown_one() -> None:
    assert steps_of(RULE, each("loss", [*noisy(200), 2.8, 2.8, 2.0, 2.8, 2.8, 2.0])) == []
    assert steps_of(RULE, each("loss", [*noisy(200), 2.8, math.nan, 2.8, math.nan, 2.8])) == [205]


def test_losses_of_skipped_steps_count() -> None:
    assert steps_of(RULE, [*each("loss", noisy(200)), record(201, loss=50.0, skipped=True)]) == [201]


def test_thresholds() -> None:
    losses = each("loss", [*noisy(40), *[2.9] * 2])
    assert steps_of(RULE, losses) == []
    assert steps_of(LossSpike(row=2), losses) == [42]
    assert steps_of(LossSpike(row=2, row_factor=20.0), losses) == []
    assert steps_of(LossSpike(row=2, deviations=50.0), losses) == []
    assert steps_of(LossSpike(row=2, share=1.0), losses) == []
    assert steps_of(LossSpike(single_factor=2.0), losses) == [41]
    assert steps_of(LossSpike(row=2, window=20, least=20), each("loss", [*noisy(20), *[3.5] * 2])) == [21]
    with pytest.raises(ConfigurationError, match=r"least=30, window=29\): there are fewer losses than are needed"):
        LossSpike(window=29)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_deviation_is_the_median_of_the_distances(values: list[float]) -> None:
    ordered = sorted(values)
    median = ordered[len(ordered) // 2]
    assert _median_distance(ordered, median) == sorted(abs(value - median) for value in values)[len(values) // 2]
