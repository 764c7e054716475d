from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepError, HalfstepWarning, InvalidTypeError


def make(precision: Any = "fp32", **settings: Any) -> MixedPrecision:
    model = settings.pop("model", None)
    if model is None:
        model = nn.Linear(2, 1)
    optimizer = settings.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return MixedPrecision(model, optimizer, precision, **settings)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (True, InvalidTypeError, r"max_grad_norm=\.\.\.\) takes a number or None, not True"),
        (False, InvalidTypeError, r"takes a number or None, not False"),
        ("1", InvalidTypeError, r"takes a number or None, not '1'"),
        (torch.ones(()), InvalidTypeError, r"takes a number or None, not tensor"),
        (math.nan, ConfigurationError, r"max_grad_norm=nan\): the largest allowed norm must be above 0; None switches it off"),
        (0, ConfigurationError, r"max_grad_norm=0\): the largest"),
        (0.0, ConfigurationError, r"max_grad_norm=0\.0\): the largest"),
        (-1, ConfigurationError, r"max_grad_norm=-1\): the largest"),
        (-math.inf, ConfigurationError, r"max_grad_norm=-inf\): the largest"),
    ],
)
def test_a_wrong_max_grad_norm_is_refused(value: Any, error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        make(max_grad_norm=value)


@pytest.mark.parametrize("value", [None, 1, 1e-3, np.float64(2.0), math.inf])
def test_a_right_max_grad_norm_is_accepted(value: Any) -> None:
    assert make(max_grad_norm=value).max_grad_norm == value


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (True, InvalidTypeError, r"accumulate=\.\.\.\) takes a whole number, not True"),
        ("2", InvalidTypeError, r"takes a whole number, not '2'"),
        (2.0, InvalidTypeError, r"takes a whole number, not 2\.0"),
        (math.nan, InvalidTypeError, r"takes a whole number, not nan"),
        (math.inf, InvalidTypeError, r"takes a whole number, not inf"),
        (None, InvalidTypeError, r"takes a whole number, not None"),
        (0, ConfigurationError, r"accumulate=0\): the number of micro-batches in a step is 1 or more"),
        (-1, ConfigurationError, r"accumulate=-1\): the number of micro-batches"),
    ],
)
def test_a_wrong_accumulate_is_refused(value: Any, error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        make(accumulate=value)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("float16", ConfigurationError, r"Unknown precision 'float16'\. Allowed are auto, fp32, bf16 and fp16\."),
        ("fp61", ConfigurationError, r"Did you mean 'fp16'\?"),
        ("Auto", ConfigurationError, r"Did you mean 'auto'\?"),
        ("", ConfigurationError, r"Unknown precision ''\."),
        (16, InvalidTypeError, r"named by a string, one of auto, fp32, bf16 and fp16, not 16\."),
        (None, InvalidTypeError, r"not None\."),
        (torch.float16, InvalidTypeError, r"not torch\.float16\."),
        (True, InvalidTypeError, r"not True\."),
    ],
)
def test_a_wrong_precision_is_refused(value: Any, error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        make(value)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"model=\.\.\.\) takes a torch\.nn\.Module, not a function"):
        MixedPrecision(lambda x: x, torch.optim.SGD([nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"The model ReLU has no parameters, so there is nothing to train"):
        make(model=nn.ReLU(), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_a_model_on_a_device_that_is_not_supported_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Device type 'meta' is not supported\. Allowed are cpu and cuda\."):
        make(model=nn.Linear(2, 1, device="meta"))


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ConfigurationError, match=r"Sequential is spread over several devices \(cpu, meta\)\. Move it to one with \.to\(\)"):
        make(model=model)


def test_a_buffer_on_another_device_is_noticed() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.ones(1, device="meta"))
    with pytest.raises(ConfigurationError, match=r"several devices \(cpu, meta\)"):
        make(model=model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trainable_parameters_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).to(dtype))
    with pytest.raises(ConfigurationError, match=rf"The trainable parameter '1\.weight' is {dtype}\. .* Call model\.float\(\) before"):
        make("fp16", model=model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_and_frozen_parameters_are_accepted(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 1).to(dtype))
    make(model=model)


@pytest.mark.parametrize("optimizer", [None, "sgd", nn.Linear(1, 1), torch.optim.SGD])
def test_an_optimizer_of_the_wrong_type_is_refused(optimizer: Any) -> None:
    kinds = "(NoneType|str|Linear|type)"
    with pytest.raises(InvalidTypeError, match=rf"optimizer=\.\.\.\) takes a torch\.optim\.Optimizer, or several, not a {kinds}"):
        MixedPrecision(nn.Linear(1, 1), optimizer)


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigurationError, match=r"ReduceLROnPlateau moves by a metric, not by a step\. .* scheduler\.step\(validation_loss\)"
    ):
        make(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize("scheduler", [0, "cosine", nn.Linear(1, 1)])
def test_a_scheduler_without_a_step_is_refused(scheduler: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"scheduler=\.\.\.\) takes an object with a step\(\) method, not a (int|str|Linear)"):
        make(scheduler=scheduler)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_enabled_scaler_is_refused_where_it_has_no_use(precision: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"A scaler was given for {precision}, .* Leave scaler out, or use fp16"):
        make(precision, scaler=torch.amp.GradScaler("cpu"))
    assert make(precision, scaler=torch.amp.GradScaler("cpu", enabled=False)).scaler is None


@pytest.mark.parametrize("native", [("bf16", "fp16", "fp32"), ("fp32",)])
def test_a_scaler_is_left_aside_when_auto_needs_none(native: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.hardware.device.native_precisions", lambda _: native)
    amp = make("auto", scaler=torch.amp.GradScaler("cpu"))
    assert (amp.precision, amp.scaler) == (native[0], None)


def test_a_scaler_is_used_when_auto_means_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.hardware.device.native_precisions", lambda _: ("fp16", "fp32"))
    scaler = torch.amp.GradScaler("cpu")
    amp = make("auto", scaler=scaler)
    assert (amp.precision, amp.scaler) == ("fp16", scaler)


def test_auto_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.hardware.device.native_precisions", lambda _: ("fp16", "fp32"))
    model = nn.Linear(1, 1)
    assert MixedPrecision(model, torch.optim.SGD(model.parameters())).precision == "fp16"


def test_a_disabled_scaler_means_fp16_without_loss_scaling() -> None:
    with pytest.warns(HalfstepWarning, match=r"fp16 runs without loss scaling, .* or pass halfstep\.LossScaler\('cpu'\)") as caught:
        amp = make("fp16", scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert amp.scaler is None
    assert Path(caught[0].filename).name == Path(__file__).name, "the warning points into halfstep"
    assert amp.train_step(lambda: amp.model(torch.ones(3, 2)).float().mean()).scale == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch disables a CUDA scaler only where there is no CUDA")
def test_a_scaler_for_a_device_that_is_not_there_is_explained() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler()
    with pytest.warns(HalfstepWarning, match=r"torch\.amp\.GradScaler\(\) without a device means CUDA, and disables itself"):
        assert make("fp16", scaler=scaler).scaler is None


@pytest.mark.parametrize("scaler", [65536.0, "dynamic", True, torch.amp.GradScaler])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "auto"])
def test_a_scaler_of_the_wrong_kind_is_refused(scaler: Any, precision: str) -> None:
    with pytest.raises(InvalidTypeError, match=r"scaler=\.\.\.\) takes a torch\.amp\.GradScaler or None, not a (float|str|bool|type)"):
        make(precision, scaler=scaler)


def test_settings_are_kept_where_they_can_be_read() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp = make("bf16", model=model, optimizer=optimizer, scheduler=scheduler, max_grad_norm=1.0, accumulate=2)
    assert (amp.model, amp.optimizer, amp.scheduler, amp.max_grad_norm, amp.accumulate) == (model, optimizer, scheduler, 1.0, 2)
    assert (amp.precision, amp.device, amp.scaler) == ("bf16", torch.device("cpu"), None)


def test_all_but_model_optimizer_and_precision_are_named() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="positional"):
        MixedPrecision(model, torch.optim.SGD(model.parameters()), "fp32", None)  # type: ignore[call-arg]
