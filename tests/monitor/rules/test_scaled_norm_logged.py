from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules import ScaledNormLogged
from halfstep.records import StepRecord
from tests.monitor.rules.streams import each, record, steps_of, verdicts

RULE = ScaledNormLogged()


def stream(scales: list[float], norm: Callable[[int, float], float], *, steps: int = 50) -> list[StepRecord]:
    """So many steps at each scale; a scale below the one before it begins with a skip at that one."""
    records: list[StepRecord] = []
    for index, scale in enumerate(scales):
        if index and scale < scales[index - 1]:
            records.append(record(len(records) + 1, scale=scales[index - 1], skipped=True, grad_norm=math.inf))
        records += [record(len(records) + n, scale=scale, grad_norm=norm(index * steps + n, scale)) for n in range(1, steps + 1)]
    return records


def noisy(seed: int, noise: float) -> Callable[[int], float]:
    generator = random.Random(seed)
    return lambda _: math.exp(noise * generator.gauss(0, 1))


def test_norms_that_double_with_the_scale_are_told_once() -> None:
    (alert,) = verdicts(RULE, stream([256.0, 512.0, 1024.0, 2048.0, 4096.0], lambda _, scale: 0.9912 * scale))
    assert alert.step == 101
    assert "when that went from 512 to 1024, times 2, the norm went from 507.5 to 1015" in alert.message
    assert "in 2 of the last 2 changes" in alert.message
    assert "without it, it is about 0.9912." in alert.message
    assert "scaler.unscale_(optimizer)" in alert.advice


def test_a_short_run_is_judged_by_the_norms_that_there_are() -> None:
    short = stream([256.0, 512.0, 1024.0], lambda _, scale: scale, steps=3)
    assert verdicts(RULE, short) == []
    (alert,) = verdicts(RULE, short, ended=True)
    assert alert.step == 7


def test_norms_that_halve_with_the_scale_count_too() -> None:
    assert len(steps_of(RULE, stream([1024.0, 512.0, 1024.0, 256.0], lambda _, scale: scale))) == 1
    (alert,) = verdicts(RULE, stream([1024.0, 512.0, 128.0], lambda _, scale: scale))
    assert "from 512 to 128, times 0.25, the norm went from 512 to 128" in alert.message


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_hide_it(seed: int) -> None:
    noise = noisy(seed, 0.2)
    assert len(steps_of(RULE, stream([2.0**n for n in range(8, 16)], lambda n, scale: scale * noise(n)))) == 1


def test_one_change_that_does_not_fit_does_not_hide_it() -> None:
    jump = stream([1.0, 2.0, 4.0, 8.0], lambda n, scale: scale if n <= 50 or n > 100 else 7.0 * scale)
    assert len(steps_of(RULE, jump)) == 0
    late = stream([1.0, 2.0, 4.0, 8.0], lambda n, scale: scale if n <= 100 else scale / 2)
    assert len(steps_of(RULE, late)) == 1


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(lambda n, scale: 1.0, id="steady"),
        pytest.param(lambda n, scale: 0.99**n, id="decreasing"),
        pytest.param(lambda n, scale: 1.01**n, id="increasing"),
        pytest.param(lambda n, scale: scale if n <= 100 else 512.0, id="once"),
        pytest.param(lambda n, scale: 1 / scale, id="the other way"),
        pytest.param(lambda n, scale: scale**0.5, id="half as much"),
        pytest.param(lambda n, scale: 0.0, id="zero"),
        pytest.param(lambda n, scale: math.nan, id="nan"),
        pytest.param(lambda n, scale: -scale, id="absurd"),
    ],
)
def test_no_alert(norm: Callable[[int, float], float]) -> None:
    assert verdicts(RULE, stream([256.0, 512.0, 1024.0, 512.0, 1024.0, 2048.0], norm), ended=True) == []


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("steps", [3, 10, 50])
def test_noise_alone_is_not_told(noise: float, steps: int) -> None:
    for seed in range(5):
        norm = noisy(seed, noise)
        scales = [2.0**10, 2.0**11] * 40
        assert verdicts(RULE, stream(scales, lambda n, _, norm=norm: norm(n), steps=steps), ended=True) == []  # type: ignore[misc]


def test_a_growth_that_is_taken_back_at_once_is_no_change() -> None:
    def there_and_back(n: int) -> list[StepRecord]:
        level = 256.0 * 2 ** (n // 3)
        return [
            *(record(50 * n + i, scale=level, grad_norm=level) for i in range(20)),
            record(50 * n + 20, scale=2 * level, grad_norm=None, skipped=True),
            *(record(50 * n + 20 + i, scale=level, grad_norm=level) for i in range(1, 3)),
        ]

    records = [one for n in range(9) for one in there_and_back(n)]
    assert steps_of(RULE, records) == [300]
    assert steps_of(RULE, [one for one in records if one.scale == 256.0 or (one.skipped and one.scale == 512.0)]) == []


def test_an_unknown_scale_does_not_end_a_stretch() -> None:
    records = stream([256.0, 512.0, 1024.0], lambda _, scale: scale)
    holes = [each("scale", [math.nan, math.inf, 0.0, -1.0])[n % 4] for n in range(len(records))]
    assert steps_of(RULE, [one for pair in zip(records, holes, strict=True) for one in pair]) == [101]


def test_three_changes_that_it_does_not_follow_arm_it_again() -> None:
    up = [2.0**n for n in range(8, 11)]

    def norm(n: int, scale: float) -> float:
        return scale if n <= 150 or n > 300 else 1024.0

    assert len(steps_of(RULE, stream([*up, *[512.0, 1024.0, 2048.0], *[4096.0, 8192.0, 16384.0]], norm))) == 2


def test_it_waits_for_twenty_norms() -> None:
    records = stream([1.0, 2.0, 4.0], lambda _, scale: scale)
    assert steps_of(RULE, records[:119]) == []
    assert steps_of(RULE, records[:120]) == [101]


def test_a_scale_that_grows_by_little_is_not_taken_for_noise() -> None:
    scales = [1.1**n for n in range(8)]
    assert verdicts(RULE, stream(scales, lambda n, scale: 1.0), ended=True) == []
    assert len(verdicts(RULE, stream(scales, lambda n, scale: scale), ended=True)) == 1


def test_norms_that_are_not_finite_are_passed_over() -> None:
    records = stream([1.0, 2.0, 4.0], lambda n, scale: math.inf if n % 7 == 0 else scale)
    assert steps_of(RULE, records) == [101]


def test_no_more_norms_are_kept_than_are_needed() -> None:
    state = RULE.start()
    for one in each("grad_norm", [1.0] * 500):
        state, _ = RULE.judge(state, one)
        assert len(state[1]) <= 40
    assert len(state[1]) >= 20


def test_thresholds() -> None:
    assert len(steps_of(ScaledNormLogged(changes=3), stream([1.0, 2.0, 4.0, 8.0], lambda _, scale: scale))) == 1
    assert steps_of(ScaledNormLogged(changes=3), stream([1.0, 2.0, 4.0], lambda _, scale: scale)) == []
    once = stream([1.0, 2.0], lambda _, scale: scale, steps=4)
    assert steps_of(ScaledNormLogged(changes=1, norms=4), once) == [5]
    assert steps_of(ScaledNormLogged(changes=1, norms=5, least_norms=5), once) == []
    with pytest.raises(ConfigurationError, match=r"changes=4\): allowed is a whole number from 1 to 3"):
        ScaledNormLogged(changes=4)
    with pytest.raises(ConfigurationError, match=r"norms=2, least_norms=3\): the least number of norms is larger"):
        ScaledNormLogged(norms=2)
