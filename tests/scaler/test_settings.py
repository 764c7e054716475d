from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.scaler import LossScaler, ScalerSettings
from halfstep.scaler.settings import check_scale

INF, NAN = math.inf, math.nan

WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    *(({"init_scale": value}, r"LossScaler\(init_scale=\.\.\.\): .* cannot be a loss scale") for value in (0, -1.0, INF, NAN, 1e39, 1e-39)),
    *(({"growth_factor": value}, r"growth_factor=.*above 1.*static=True") for value in (1, 0.5, 0, -2, INF, NAN)),
    *(({"backoff_factor": value}, r"backoff_factor=.*between 0 and 1.*static=True") for value in (0, 1, 2, -1, NAN, INF)),
    *(({"growth_interval": value}, r"growth_interval=.*whole number from 1 to 2147483647") for value in (0, -1, 2**31)),
    *(({"hysteresis": value}, r"hysteresis=.*whole number from 0") for value in (-1, 2**31)),
    *(({"max_consecutive_skips": value}, r"max_consecutive_skips=.*whole number from 1") for value in (0, -1, 2**31)),
    *(({"min_scale": value}, r"min_scale=.*finite number from 0; 0 means no floor") for value in (-1, INF, NAN)),
    *(({"max_scale": value}, r"max_scale=.*above 0; None means no ceiling") for value in (0, -1, NAN, -INF)),
    ({"init_scale": 4, "min_scale": 8}, r"init_scale=4.0, min_scale=8.0\): the first scale lies below the floor"),
    ({"init_scale": 4, "max_scale": 2}, r"init_scale=4.0, max_scale=2.0\): the first scale lies above the ceiling"),
]
WRONG_TYPES: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
        for value in ("2", True, [2.0])
    ),
    *((name, value) for name in ("growth_interval", "hysteresis", "max_consecutive_skips") for value in (2.0, "2", True)),
    *(("static", value) for value in (1, "yes", None)),
    *(("enabled", value) for value in (1, "yes", None)),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUES, ids=str)
def test_a_value_that_is_not_allowed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ScalerSettings(**changes)
    with pytest.raises(ValueError, match=message):
        LossScaler("cpu", **changes)


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match=rf"LossScaler\({name}=\.\.\.\) takes .*, not "):
        LossScaler("cpu", **{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"init_scale": 1},
        {"init_scale": np.float32(8)},
        {"growth_interval": np.int64(1), "hysteresis": 0, "max_consecutive_skips": 1},
        {"growth_interval": 2**31 - 1},
        {"init_scale": 4.0, "min_scale": 4.0, "max_scale": 4.0},
        {"max_scale": INF},
        {"max_scale": 1e300},
        {"init_scale": 2.0**-126, "min_scale": 0},
        {"init_scale": 3.4028234663852886e38},
        {"growth_factor": 1.0001, "backoff_factor": 0.9999},
    ],
    ids=str,
)
def test_values_at_the_edge_are_accepted(changes: dict[str, Any]) -> None:
    settings = LossScaler("cpu", **changes).settings
    for name, value in changes.items():
        kept = getattr(settings, name)
        assert kept == value
        assert type(kept) in (float, int)


def test_the_defaults_of_the_scaler_are_those_of_its_settings() -> None:
    assert LossScaler("cpu").settings == ScalerSettings()
    assert LossScaler.__init__.__kwdefaults__ == {**ScalerSettings().as_dict(), "enabled": True}


def test_the_defaults_are_those_of_torch_where_it_has_them() -> None:
    theirs = torch.amp.GradScaler("cpu")
    ours = LossScaler("cpu")
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(ours, name)() == getattr(theirs, name)()


def test_settings_are_values() -> None:
    assert ScalerSettings(hysteresis=1) == ScalerSettings(hysteresis=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScalerSettings().hysteresis = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, False),
        ({"min_scale": 0}, True),
        ({"min_scale": 0.5}, True),
        ({"min_scale": 0.5, "static": True}, False),
        ({"min_scale": 0, "init_scale": 0.5, "static": True}, True),
    ],
)
def test_whether_gradients_can_grow_when_they_are_unscaled(changes: dict[str, Any], may: bool) -> None:
    assert ScalerSettings(**changes).may_fall_below_one is may


def test_bounds_are_compared_in_float32() -> None:
    settings = ScalerSettings(init_scale=0.7, min_scale=0.7, max_scale=0.7)
    held = torch.tensor(0.7).item()
    assert held < 0.7
    assert settings.floor == settings.ceiling == settings.clamped(held) == held
    assert settings.clamped(0.1) == held
    assert settings.clamped(3.0) == held
    assert ScalerSettings(max_scale=1e300).ceiling == ScalerSettings().ceiling == INF


def test_a_scale_is_what_float32_makes_of_it() -> None:
    assert check_scale(0.1, named="x") == torch.tensor(0.1).item()
    assert check_scale(np.float64(3), named="x") == 3.0
    with pytest.raises(InvalidTypeError, match=r"update\(\.\.\.\) takes a number, not '3'"):
        check_scale("3", named="update(...)")


@pytest.mark.parametrize("device", ["mps", "cuda:0", "CPU", ""])
def test_only_two_kinds_of_device_are_served(device: str) -> None:
    with pytest.raises(ConfigurationError, match="allowed are 'cpu', 'cuda', and None"):
        LossScaler(device)


def test_a_device_is_named() -> None:
    with pytest.raises(InvalidTypeError, match=r"takes the name of a device type.*not device\(type='cpu'\)"):
        LossScaler(torch.device("cpu"))  # type: ignore[arg-type]


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"LossScaler\('cuda'\): this torch .* sees no CUDA device"):
        LossScaler("cuda")


def test_torch_takes_settings_that_cannot_be_right() -> None:
    torch.amp.GradScaler("cpu", init_scale=-1.0, backoff_factor=-1.0, growth_interval=0)
    with pytest.raises(ConfigurationError, match="init_scale"):
        LossScaler("cpu", init_scale=-1.0, backoff_factor=-1.0, growth_interval=0)
