from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.scaler import LossScaler, ScalerSettings
from halfstep.scaler.moving import checked_new_scale, move_scale_
from tests.scaler.loops import INF, NAN, Model

FLAGS = st.lists(st.booleans(), max_size=60)
FACTORS = {
    "growth_factor": st.floats(1.0, 16.0, exclude_min=True),
    "backoff_factor": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    "growth_interval": st.sampled_from([1, 2]) | st.integers(1, 20),
}


def follow(scaling: ScalerSettings, flags: list[bool]) -> tuple[list[float], list[int], list[int]]:
    """The scale, the growth tracker and the tolerance after each update."""
    scale = torch.full((), scaling.init_scale)
    tracker = torch.zeros((), dtype=torch.int32)
    tolerance = torch.full((), scaling.hysteresis, dtype=torch.int32) if scaling.hysteresis else None
    scales, trackers, tolerances = [], [], []
    for finite in flags:
        found = torch.zeros(()) if finite else torch.ones(())
        kept = found.clone()
        move_scale_(scale, growth_tracker=tracker, tolerance=tolerance, found_inf=found, settings=scaling)
        assert torch.equal(found, kept)
        scales.append(scale.item())
        trackers.append(int(tracker))
        tolerances.append(0 if tolerance is None else int(tolerance))
    return scales, trackers, tolerances


@given(init=st.floats(2.0**-40, 2.0**60), flags=FLAGS, **FACTORS)
def test_without_bounds_it_is_torch_arithmetic(
    init: float, flags: list[bool], growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    factors: dict[str, Any] = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    scales, trackers, _ = follow(
        ScalerSettings(init_scale=init, min_scale=0, growth_interval=growth_interval, **factors),
        flags,
    )
    scale, tracker = torch.full((), init), torch.zeros((), dtype=torch.int32)
    for index, finite in enumerate(flags):
        found = torch.full((), float(not finite))
        torch._amp_update_scale_(scale, tracker, found, growth_factor, backoff_factor, growth_interval)
        assert scales[index] == scale.item()
        assert trackers[index] == tracker.item()


@settings(max_examples=300)
@given(
    bounds=st.tuples(st.floats(0, 2.0**20), st.floats(2.0**-20, 2.0**40), st.none() | st.floats(2.0**-20, 2.0**60) | st.just(INF)),
    hysteresis=st.integers(0, 4),
    flags=FLAGS,
    **FACTORS,
)
def test_with_bounds_and_hysteresis_it_is_the_model(
    bounds: tuple[float, float, float | None],
    hysteresis: int,
    flags: list[bool],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    low, init, high = sorted(bounds[:2])[0], sorted(bounds[:2])[1], bounds[2]
    scaling = ScalerSettings(
        init_scale=init if init >= 2.0**-126 else 1.0,
        min_scale=low,
        max_scale=None if high is None else max(high, init, 1.0),
        hysteresis=hysteresis,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    scales, trackers, tolerances = follow(scaling, flags)
    model = Model(LossScaler("cpu", **scaling.as_dict()))  # type: ignore[arg-type]
    for index, finite in enumerate(flags):
        model.update(bad=not finite)
        assert scales[index] == model.scale
        assert trackers[index] == model.tracker
        assert tolerances[index] == model.tolerance
        assert scaling.floor <= scales[index] <= scaling.ceiling


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_so_many_skips_are_tolerated_and_then_each_counts(hysteresis: int) -> None:
    scaling = ScalerSettings(init_scale=1024.0, hysteresis=hysteresis)
    scales, _, _ = follow(scaling, [False] * (hysteresis + 2))
    assert scales == [1024.0] * hysteresis + [512.0, 256.0]


def test_tolerance_is_granted_again_when_the_scale_grows() -> None:
    scaling = ScalerSettings(init_scale=8.0, hysteresis=1, growth_interval=2)
    scales, _, tolerances = follow(scaling, [False, True, True, False, False])
    assert scales == [8.0, 8.0, 16.0, 16.0, 8.0]
    assert tolerances == [0, 0, 1, 0, 0]


def test_tolerance_is_granted_again_at_the_ceiling() -> None:
    scaling = ScalerSettings(init_scale=8.0, max_scale=8.0, hysteresis=1, growth_interval=2)
    scales, _, tolerances = follow(scaling, [False, True, True, False, False])
    assert scales == [8.0, 8.0, 8.0, 8.0, 4.0]
    assert tolerances == [0, 0, 1, 0, 0]


def test_a_tolerated_skip_begins_the_growth_interval_anew() -> None:
    scaling = ScalerSettings(init_scale=8.0, hysteresis=5, growth_interval=3)
    scales, trackers, _ = follow(scaling, [True, True, False, True, True, True])
    assert trackers == [1, 2, 0, 1, 2, 0]
    assert scales == [8.0] * 5 + [16.0]


def test_a_ceiling_beyond_float32_is_none() -> None:
    assert follow(ScalerSettings(init_scale=8.0, max_scale=1e300, growth_interval=1), [True])[0] == [16.0]


@pytest.mark.parametrize(
    ("given_scale", "expected"),
    [(2, 2.0), (0.5, 0.5), (torch.tensor(3), 3.0), (torch.tensor([4.0], requires_grad=True), 4.0), (torch.full((1, 1), 8.0), 8.0)],
)
def test_a_new_scale_may_be_a_number_or_a_tensor(given_scale: float | torch.Tensor, expected: float) -> None:
    assert checked_new_scale(given_scale) == expected


@pytest.mark.parametrize("value", [0, -1, 0.0, NAN, INF, -INF, 1e39, math.ulp(0.0)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_new_scale_that_cannot_be_one_is_refused(value: float, as_tensor: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"update\(new_scale\): .* cannot be a loss scale"):
        checked_new_scale(torch.tensor(value, dtype=torch.float64) if as_tensor else value)


@pytest.mark.parametrize("value", ["2", [2.0], True, torch.tensor(True), 2j])
def test_a_new_scale_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"update\(new_scale\) takes a number"):
        checked_new_scale(value)


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.complex64)])
def test_a_new_scale_has_one_real_element(value: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match=r"a tensor with one element, not one of shape"):
        checked_new_scale(value)


def test_a_new_scale_on_a_device_is_not_waited_for() -> None:
    value = checked_new_scale(torch.full((1,), 2.0, device="meta"))
    assert isinstance(value, torch.Tensor)
    assert value.shape == ()
