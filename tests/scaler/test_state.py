from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler, ScalerSettings
from halfstep.scaler.state import ScalerState
from tests.scaler.loops import INF, NAN, OPTIMIZERS, backward, iterate, weights

# None of them a default, and each within the others' bounds; a new field fails the test below until it has a value here.
SETTINGS: dict[str, Any] = {
    "init_scale": 64.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_scale": 0.5,
    "max_scale": 2048.0,
    "hysteresis": 4,
    "static": True,
    "max_consecutive_skips": 11,
}
STATE: dict[str, Any] = {"scale": 128.0, "growth_tracker": 5, "tolerance": 2, "steps": 90, "skips": 30, "consecutive_skips": 3}
TORCH_ENTRIES = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def used(**settings: Any) -> LossScaler:
    """A scaler that has seen two good steps, three skips, and one good step more."""
    scaler = LossScaler("cpu", **settings)
    optimizer = OPTIMIZERS["sgd"](weights())
    for factor in (1.0, 1.0, INF, INF, INF, 1.0):
        iterate(scaler, optimizer, factor)
    return scaler


def entries(scaler: LossScaler) -> dict[str, Any]:
    """The state, which must not change by being looked at."""
    state = scaler.state_dict()
    assert scaler.state_dict() == state
    return state


def test_every_field_has_a_value_here_that_is_no_default() -> None:
    for cls, values in ((ScalerSettings, SETTINGS), (ScalerState, STATE)):
        assert [field.name for field in dataclasses.fields(cls)] == list(values)
        for field in dataclasses.fields(cls):
            assert values[field.name] != field.default


@pytest.mark.parametrize("static", [False, True])
def test_every_field_goes_round(static: bool) -> None:
    settings = ScalerSettings(**SETTINGS | {"static": static})
    state = ScalerState(**STATE | ({"scale": settings.init_scale} if static else {}))
    saved = state.as_dict(settings)
    assert len(saved) == len(SETTINGS) + len(STATE)
    assert saved.keys() >= TORCH_ENTRIES
    assert ScalerState.parse(saved, settings=ScalerSettings(), adopt_settings=True) == (settings, state)
    scaler = LossScaler("cpu")
    scaler.load_state_dict(saved, adopt_settings=True)
    assert scaler.settings == settings
    assert entries(scaler) == saved
    backward(scaler, weights(), 1.0)  # Now the state lies in tensors.
    assert entries(scaler) == saved


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_every_field_goes_with_a_copy(clone: Callable[[LossScaler], LossScaler]) -> None:
    scaler = LossScaler("cpu")
    scaler.load_state_dict(ScalerState(**STATE).as_dict(ScalerSettings(**SETTINGS | {"static": False})), adopt_settings=True)
    twin = clone(scaler)
    assert type(twin) is LossScaler
    assert entries(twin) == entries(scaler)
    assert twin.settings == scaler.settings
    iterate(twin, OPTIMIZERS["sgd"](weights()), INF)
    assert twin.stats().skips == 31
    assert scaler.stats().skips == 30, "the copy shares its counts"


@pytest.mark.parametrize("settings", [{}, {"hysteresis": 2, "growth_interval": 2}, {"static": True}, {"min_scale": 0, "init_scale": 1.0}])
@pytest.mark.parametrize("started", [False, True])
def test_a_loaded_run_goes_on_as_if_it_had_not_stopped(settings: dict[str, Any], started: bool) -> None:
    scaler = used(**settings)
    twin = LossScaler("cpu", **settings)
    if started:
        iterate(twin, OPTIMIZERS["sgd"](weights()), INF)
    twin.load_state_dict(scaler.state_dict())
    for factor in (1.0, INF, INF, 1.0, 1.0, INF):
        for each in (scaler, twin):
            iterate(each, OPTIMIZERS["sgd"](weights()), factor)
        assert twin.state_dict() == scaler.state_dict()


def test_torch_loads_our_state() -> None:
    scaler = used(growth_interval=2, growth_factor=3.0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == {name: value for name, value in scaler.state_dict().items() if name in TORCH_ENTRIES}


def test_we_load_the_state_of_torch() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)
    iterate(theirs, OPTIMIZERS["sgd"](weights()), 1.0)
    assert set(theirs.state_dict()) == TORCH_ENTRIES
    scaler = LossScaler("cpu", hysteresis=2)
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.settings == ScalerSettings(hysteresis=2), "the settings of this run are gone"
    assert scaler.state_dict()["tolerance"] == 2
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (256.0, 1)
    scaler.load_state_dict(theirs.state_dict(), adopt_settings=True)
    assert scaler.settings == ScalerSettings(hysteresis=2, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)


def test_settings_are_adopted_on_request_only() -> None:
    saved = used(hysteresis=1, growth_interval=3, max_consecutive_skips=8).state_dict()
    scaler = LossScaler("cpu", growth_interval=9)
    scaler.load_state_dict(saved)
    assert scaler.settings == ScalerSettings(growth_interval=9)
    scaler.load_state_dict(saved, adopt_settings=True)
    assert scaler.settings == ScalerSettings(hysteresis=1, growth_interval=3, max_consecutive_skips=8)
    optimizer = OPTIMIZERS["sgd"](weights())
    for _ in range(7):
        iterate(scaler, optimizer, INF)
    with pytest.raises(RuntimeError, match="8 steps in a row"):
        iterate(scaler, optimizer, INF)


@pytest.mark.parametrize(("bounds", "expected"), [({"min_scale": 1024.0}, 1024.0), ({"max_scale": 4.0, "init_scale": 2.0}, 4.0)])
def test_a_scale_beyond_the_bounds_is_brought_back_with_a_warning(bounds: dict[str, float], expected: float) -> None:
    scaler = LossScaler("cpu", **bounds)  # type: ignore[arg-type]
    with pytest.warns(HalfstepWarning, match=rf"loaded loss scale 128 lies outside .* goes on with {expected:g}") as caught:
        scaler.load_state_dict(ScalerState(**STATE).as_dict(ScalerSettings()))
    assert caught[0].filename == __file__
    assert scaler.get_scale() == expected


@pytest.mark.parametrize("bound", [0.1, 0.7, 1 / 3, 1e-3])
def test_bounds_that_float32_cannot_hold_warn_of_nothing(bound: float) -> None:
    for settings in ({"min_scale": bound, "init_scale": 8 * bound}, {"max_scale": bound, "init_scale": bound, "min_scale": 0}):
        scaler = LossScaler("cpu", growth_interval=1, **settings)  # type: ignore[arg-type]
        for factor in (INF, INF, INF, INF, INF) if "max_scale" not in settings else (1.0, 1.0):
            iterate(scaler, OPTIMIZERS["sgd"](weights()), factor)
        assert scaler.get_scale() == torch.tensor(bound).item()
        for each in (scaler, LossScaler("cpu", **settings)):  # type: ignore[arg-type]
            before = each.state_dict()["scale"]
            each.load_state_dict(each.state_dict())
            assert each.get_scale() == pytest.approx(before)


def test_a_static_scale_is_a_setting_and_stays() -> None:
    scaler = LossScaler("cpu", init_scale=32.0, static=True)
    scaler.load_state_dict(ScalerState(**STATE).as_dict(ScalerSettings()))
    assert scaler.get_scale() == 32.0
    assert scaler.stats().steps == STATE["steps"]


def test_a_growth_tracker_beyond_the_interval_still_lets_the_scale_grow() -> None:
    scaler = LossScaler("cpu", growth_interval=3)
    scaler.load_state_dict(ScalerState(**STATE).as_dict(ScalerSettings()))  # its tracker is 5
    assert scaler.state_dict()["_growth_tracker"] == 2
    iterate(scaler, OPTIMIZERS["sgd"](weights()), 1.0)
    assert scaler.get_scale() == 256.0


def test_tolerance_is_at_most_what_this_run_grants() -> None:
    _, state = ScalerState.parse(
        ScalerState(**STATE).as_dict(ScalerSettings()), settings=ScalerSettings(hysteresis=1), adopt_settings=False
    )
    assert state.tolerance == 1


GOOD = ScalerState(**STATE).as_dict(ScalerSettings())
BROKEN: list[tuple[Any, type[Exception], str]] = [
    ({}, ConfigurationError, "state is empty: it was saved by a disabled scaler"),
    (None, InvalidTypeError, "is a dictionary, as state_dict.* not a NoneType"),
    ([("scale", 1.0)], InvalidTypeError, "not a list"),
    ({"scale": 1.0}, ConfigurationError, "has no entry '_growth_tracker', but 'scale'"),
    ({"_growth_tracker": 1}, ConfigurationError, "has no entry 'scale', but '_growth_tracker'"),
    *((GOOD | {"scale": value}, ConfigurationError, "entry 'scale': .* cannot be a loss scale") for value in (0.0, -1.0, NAN, INF)),
    *((GOOD | {"scale": value}, InvalidTypeError, "entry 'scale' takes a number") for value in ("1", None, True)),
    *(
        (GOOD | {name: value}, error, f"entry '{name}', is ")
        for name in ("_growth_tracker", "tolerance", "steps", "skips", "consecutive_skips")
        for value, error in ((-1, ConfigurationError), (1.5, InvalidTypeError), (True, InvalidTypeError), (None, InvalidTypeError))
    ),
]


@pytest.mark.parametrize(("saved", "error", "message"), BROKEN, ids=str)
@pytest.mark.parametrize("adopt", [False, True])
def test_a_state_that_is_refused_changes_nothing(saved: Any, error: type[Exception], message: str, adopt: bool) -> None:
    scaler = used(hysteresis=1)
    before, settings = entries(scaler), scaler.settings
    with pytest.raises(error, match=message):
        scaler.load_state_dict(saved, adopt_settings=adopt)
    assert entries(scaler) == before
    assert scaler.settings is settings


@pytest.mark.parametrize("change", [{"growth_factor": 1.0}, {"hysteresis": -1}, {"min_scale": 1e6}, {"static": 1}], ids=str)
def test_settings_that_are_not_allowed_are_not_adopted(change: dict[str, Any]) -> None:
    scaler = used()
    before = entries(scaler)
    with pytest.raises((ConfigurationError, InvalidTypeError), match=next(iter(change))):
        scaler.load_state_dict(GOOD | change, adopt_settings=True)
    assert entries(scaler) == before
    scaler.load_state_dict(GOOD | change)
    assert scaler.get_scale() == 128.0


def test_a_warning_that_is_an_error_changes_nothing() -> None:
    scaler = LossScaler("cpu", min_scale=1024.0)
    before = entries(scaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HalfstepWarning, match="lies outside"):
            scaler.load_state_dict(GOOD)
    assert entries(scaler) == before


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    scaler = LossScaler("cpu")
    scaler.load_state_dict(GOOD | {"_growth_tracker": np.int64(4), "scale": np.float32(16)})
    state = entries(scaler)
    assert (state["_growth_tracker"], state["scale"]) == (4, 16.0)
    assert type(state["_growth_tracker"]) is int


def test_entries_that_are_not_known_are_left_alone() -> None:
    scaler = LossScaler("cpu")
    scaler.load_state_dict(GOOD | {"from_the_future": object()}, adopt_settings=True)
    assert entries(scaler) == GOOD | {"tolerance": 0}


def test_the_state_is_plain_and_can_be_written_as_json() -> None:
    state = used(hysteresis=1).state_dict()
    assert all(value is None or type(value) in (int, float, bool) for value in state.values())
    assert all(not isinstance(value, float) or math.isfinite(value) for value in state.values())


@pytest.mark.parametrize("stepped", [False, True])
def test_a_load_in_the_middle_of_an_iteration_is_refused(stepped: bool) -> None:
    scaler, (weight,) = LossScaler("cpu", init_scale=8.0), weights()
    optimizer = OPTIMIZERS["sgd"]([weight])
    backward(scaler, [weight], 1.0)
    scaler.unscale_(optimizer)
    if stepped:
        scaler.step(optimizer)
    before = scaler.state_dict()
    with pytest.raises(StepOrderError, match=r"between unscale_\(\) or step\(\) and update\(\)"):
        scaler.load_state_dict(GOOD)
    assert scaler.state_dict() == before
    scaler.update()
    scaler.load_state_dict(GOOD)
    assert scaler.get_scale() == GOOD["scale"]


def test_a_scale_that_fell_to_zero_can_be_saved_and_loaded() -> None:
    scaler = LossScaler("cpu", init_scale=2.0**-120, min_scale=0.0)
    optimizer = OPTIMIZERS["sgd"](weights())
    for _ in range(40):
        iterate(scaler, optimizer, INF)
    twin = LossScaler("cpu", init_scale=2.0**-120, min_scale=0.0)
    twin.load_state_dict(scaler.state_dict())
    assert twin.get_scale() == scaler.get_scale() == 0.0
    with pytest.raises(ConfigurationError, match=r"0\.0 cannot be a loss scale"):
        LossScaler("cpu").load_state_dict(scaler.state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
def test_a_state_may_be_loaded_between_backward_and_step(optimizer: str) -> None:
    scaler, (weight,) = LossScaler("cpu", init_scale=8.0), weights()
    backward(scaler, [weight], 1.0)
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(OPTIMIZERS[optimizer]([weight]))
    assert weight.tolist() == [0.5] * 3


@pytest.mark.parametrize("moment", ["scaled", "unscaled", "stepped"])
@pytest.mark.parametrize("optimizer", ["momentum", "momentum-fused"])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_from_the_middle_of_an_iteration_begins_a_fresh_one(moment: str, optimizer: str, clone: Any) -> None:
    scaler, (weight,) = LossScaler("cpu", init_scale=8.0, hysteresis=1), weights()
    made = OPTIMIZERS[optimizer]([weight])
    iterate(scaler, made, 1.0)
    iterate(scaler, made, 1.0)
    backward(scaler, [weight], INF)
    if moment != "scaled":
        scaler.unscale_(made)
    if moment == "stepped":
        scaler.step(made)
    twin = clone(scaler)
    twin.update()
    assert twin.stats().skips == 0
    assert twin.stats().scale == 8.0
    iterate(twin, made, INF)
    assert twin.state_dict()["tolerance"] == 0
    if moment != "stepped":
        scaler.step(made)
    scaler.update()
    assert scaler.stats().skips == 1


@pytest.mark.parametrize("optimizer", ["sgd-fused", "momentum"])
def test_counts_that_lie_on_the_device_are_saved(optimizer: str) -> None:
    scaler = LossScaler("cpu")
    made = OPTIMIZERS[optimizer](weights())
    for factor in (INF, 1.0, INF, INF):
        iterate(scaler, made, factor)
    saved = entries(scaler)
    assert [saved[name] for name in ("steps", "skips", "consecutive_skips")] == [4, 3, 2]
    twin = LossScaler("cpu")
    twin.load_state_dict(saved)
    iterate(twin, made, INF)
    assert (twin.stats().steps, twin.stats().skips, twin.stats().consecutive_skips) == (5, 4, 3)
