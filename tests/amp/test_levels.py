from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep import Policy
from halfstep.amp.levels import LEVELS, Properties
from halfstep.errors import ConfigurationError, InvalidTypeError


def test_the_defaults_are_those_of_apexs_documentation() -> None:
    fields = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    assert {name: tuple(getattr(level, field) for field in fields) for name, level in LEVELS.items()} == {
        "O0": (torch.float32, False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": (torch.float16, False, True, True, "dynamic"),
        "O3": (torch.float16, False, False, False, 1.0),
    }
    assert all(level.opt_level == name for name, level in LEVELS.items())


@pytest.mark.parametrize(
    ("level", "changes", "policy", "stores_half"),
    [
        ("O0", {}, "O0", False),
        ("O1", {}, "O1", False),
        ("O2", {}, "O2", False),
        ("O3", {}, "O3", True),
        ("O1", {"cast_model_type": torch.bfloat16}, "bf16", False),
        ("O1", {"cast_model_type": torch.float32}, "O1", False),
        ("O1", {"cast_model_type": False}, "O1", False),
        ("O1", {"patch_torch_functions": False}, None, False),
        ("O2", {"keep_batchnorm_fp32": False}, "O3", False),
        ("O2", {"keep_batchnorm_fp32": "False"}, "O3", False),
        ("O2", {"master_weights": False}, "O2", True),
        ("O2", {"cast_model_type": torch.float32}, "O0", False),
        ("O2", {"cast_model_type": False}, None, False),
        ("O3", {"keep_batchnorm_fp32": "True"}, "O2", True),
        ("O3", {"master_weights": True}, "O3", False),
        ("O3", {"cast_model_type": torch.bfloat16}, "pure bf16", True),
        ("O0", {"keep_batchnorm_fp32": True, "patch_torch_functions": False}, "O0", False),
    ],
)
def test_what_a_level_with_changes_stands_for(level: str, changes: dict[str, Any], policy: str | None, stores_half: bool) -> None:
    properties = Properties.of(level, changes)
    assert properties.policy() == (None if policy is None else Policy.parse(policy))
    assert properties.stores_half == stores_half


def test_the_norms_stay_in_fp32_at_o2_in_bf16() -> None:
    policy = Properties.of("O2", {"cast_model_type": torch.bfloat16}).policy()
    assert policy is not None
    assert policy.default == "bf16"
    assert policy.overrides == Policy.O2.overrides


@pytest.mark.parametrize("level", ["O4", "01", "o1", 1, None])
def test_there_is_no_such_level(level: object) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed are 'O0', 'O1', 'O2' and 'O3', with the letter O, not a zero"):
        Properties.of(level, {})


@pytest.mark.parametrize(
    ("level", "changes", "message"),
    [
        ("O1", {"cast_model_type": torch.float16}, "O1 casts operations, and the model's parameters stay in fp32"),
        ("O1", {"keep_batchnorm_fp32": True}, r"keep_batchnorm_fp32=True\): O1 leaves norms to autocast"),
        ("O1", {"keep_batchnorm_fp32": "False"}, r"keep_batchnorm_fp32=False\): O1 leaves norms to autocast"),
        ("O1", {"master_weights": True}, r"master_weights=True\): with O1 the model's parameters are fp32"),
        ("O1", {"master_weights": False}, r"master_weights=False\): with O1 the model's parameters are fp32"),
        ("O2", {"patch_torch_functions": True}, "only O1 casts operations one by one. Use opt_level='O1'"),
        ("O2", {"cast_model_type": torch.float64}, "allowed are torch.float16, torch.bfloat16, torch.float32 and None"),
        ("O2", {"loss_scale": "large"}, "allowed are 'dynamic' and a number above 0"),
        ("O2", {"loss_scale": -1.0}, "-1.0 cannot be a loss scale"),
        ("O2", {"loss_scale": "nan"}, "nan cannot be a loss scale"),
    ],
)
def test_what_does_not_go_with_a_level(level: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Properties.of(level, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_batchnorm_fp32": "true"}, "allowed are True, False, 'True', 'False' and None"),
        ({"keep_batchnorm_fp32": 1}, "keep_batchnorm_fp32=1"),
        ({"master_weights": "True"}, r"master_weights='True'\): allowed are True, False and None"),
        ({"patch_torch_functions": 0}, r"patch_torch_functions=0\): allowed are True, False and None"),
        ({"loss_scale": True}, r"loss_scale=...\) takes a number, not True"),
        ({"loss_scale": [1.0]}, r"loss_scale=...\) takes a number, not \[1.0\]"),
    ],
)
def test_a_value_of_a_wrong_type(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        Properties.of("O2", changes)


@pytest.mark.parametrize(
    ("loss_scale", "floor", "ceiling", "expected"),
    [
        ("dynamic", None, 2.0**24, (2.0**16, 1.0, 2.0**24, False)),
        ("dynamic", 2.0**18, 2.0**24, (2.0**18, 2.0**18, 2.0**24, False)),
        ("dynamic", 2.0**-4, 2.0**10, (2.0**10, 2.0**-4, 2.0**10, False)),
        ("dynamic", None, 0.5, (0.5, 0.5, 0.5, False)),
        (128.0, None, 2.0**24, (128.0, 1.0, None, True)),
        (0.25, 2.0, 1.0, (0.25, 0.25, None, True)),  # The bounds are those of a dynamic scale.
    ],
)
def test_the_scaler(loss_scale: float | str, floor: float | None, ceiling: float, expected: tuple[object, ...]) -> None:
    settings = Properties.of("O2", {"loss_scale": loss_scale}).scaler(min_loss_scale=floor, max_loss_scale=ceiling).settings
    assert (settings.init_scale, settings.min_scale, settings.max_scale, settings.static) == expected
    assert (settings.growth_factor, settings.backoff_factor, settings.growth_interval, settings.hysteresis) == (2.0, 0.5, 2000, 0)


def test_bounds_that_cannot_be() -> None:
    properties = LEVELS["O1"]
    with pytest.raises(ConfigurationError, match=r"min_loss_scale=4.0, max_loss_scale=2.0\): the floor lies above the ceiling"):
        properties.scaler(min_loss_scale=4.0, max_loss_scale=2.0)
    with pytest.raises(ConfigurationError, match=r"min_loss_scale=...\): 0.0 cannot be a loss scale"):
        properties.scaler(min_loss_scale=0.0, max_loss_scale=2.0)
    with pytest.raises(InvalidTypeError, match=r"max_loss_scale=...\) takes a number, not None"):
        properties.scaler(min_loss_scale=None, max_loss_scale=None)  # type: ignore[arg-type]
