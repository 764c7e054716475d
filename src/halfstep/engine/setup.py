"""What an engine checks and settles once, when it is made."""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.hardware import check_device
from halfstep.records import Precision

__all__ = [
    "Scheduler",
    "check_accumulate",
    "check_max_grad_norm",
    "check_optimizer",
    "check_scheduler",
    "check_weights",
    "model_device",
    "settle_scaler",
]


class Scheduler(Protocol):
    """Anything that moves a schedule by one step: every `torch.optim.lr_scheduler` but `ReduceLROnPlateau`."""

    def step(self) -> None:
        """Moves the schedule."""


def model_device(model: nn.Module) -> torch.device:
    """The one device that all parameters and buffers of a model are on.

    Raises:
        InvalidTypeError: It is no module.
        ConfigurationError: It has no parameters, or is spread over several devices, or is on a type that halfstep does not support.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"MixedPrecision(model=...) takes a torch.nn.Module, not a {type(model).__name__}.")
    if next(model.parameters(), None) is None:
        raise ConfigurationError(f"The model {type(model).__name__} has no parameters, so there is nothing to train.")
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ConfigurationError(f"The model {type(model).__name__} is spread over several devices ({listed}). Move it to one with .to().")
    device = devices.pop()
    check_device(device)
    return device


def check_weights(model: nn.Module) -> None:
    """Accepts a model whose trainable parameters are stored in fp32 or wider; frozen ones may be of any dtype.

    Raises:
        ConfigurationError: A trainable parameter is stored in half precision, where small updates are lost.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.element_size() < 4:
            raise ConfigurationError(
                f"The trainable parameter {name!r} is {parameter.dtype}. Mixed precision keeps trainable parameters in fp32 and lowers the "
                "operations instead, since small updates are lost in half precision. Call model.float() before making the optimizer."
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Accepts an optimizer whose `step()` needs no closure.

    Raises:
        InvalidTypeError: It is no optimizer.
        ConfigurationError: It calls a closure several times in each step.
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"MixedPrecision(optimizer=...) takes a torch.optim.Optimizer, not a {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in each step, through a closure, which MixedPrecision does not drive. "
            "Use an optimizer that steps once per gradient, such as AdamW, or keep LBFGS in a loop of its own in fp32."
        )


def check_scheduler(scheduler: object) -> None:
    """Accepts a scheduler that moves with each optimizer step.

    Raises:
        InvalidTypeError: It has no `step` method.
        ConfigurationError: It moves by a metric.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau moves by a metric, not by a step. Leave it out of MixedPrecision and call "
            "scheduler.step(validation_loss) yourself after each validation."
        )
    if not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(f"MixedPrecision(scheduler=...) takes an object with a step() method, not a {type(scheduler).__name__}.")


def check_max_grad_norm(value: float | None) -> None:
    """Accepts a positive number, infinity included, or `None`.

    Raises:
        InvalidTypeError: It is no number.
        ConfigurationError: It is not above 0.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(f"MixedPrecision(max_grad_norm=...) takes a number or None, not {value!r}.")
    if math.isnan(value) or value <= 0:
        raise ConfigurationError(
            f"MixedPrecision(max_grad_norm={value!r}): the largest allowed norm must be above 0; None switches it off."
        )


def check_accumulate(value: int) -> None:
    """Accepts a whole number from 1.

    Raises:
        InvalidTypeError: It is no whole number.
        ConfigurationError: It is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"MixedPrecision(accumulate=...) takes a whole number, not {value!r}.")
    if value < 1:
        raise ConfigurationError(f"MixedPrecision(accumulate={value}): the number of micro-batches in a step is 1 or more.")


def settle_scaler(
    scaler: torch.amp.GradScaler | None, *, requested: str, precision: Precision, device: torch.device
) -> torch.amp.GradScaler | None:
    """The scaler that a step will use: torch's own for fp16 unless one was given, and none for fp32 and bf16.

    Args:
        scaler: What the user gave.
        requested: The precision as the user named it; with `auto`, a scaler that turns out not to be needed is left aside.
        precision: The precision that it means here.
        device: The model's device.

    Raises:
        InvalidTypeError: `scaler` is no GradScaler.
        ConfigurationError: An enabled scaler was given for a precision that needs none.
    """
    given: object = scaler
    if given is not None and not isinstance(given, torch.amp.GradScaler):
        raise InvalidTypeError(f"MixedPrecision(scaler=...) takes a torch.amp.GradScaler or None, not a {type(given).__name__}.")
    enabled = scaler is not None and scaler.is_enabled()
    if precision != "fp16":
        if enabled and requested != "auto":
            raise ConfigurationError(
                f"A scaler was given for {precision}, whose exponent range is that of fp32: there is nothing to rescue. "
                "Leave scaler out, or use fp16."
            )
        return None
    if scaler is None:
        return torch.amp.GradScaler(device.type)
    if not enabled:
        warnings.warn(
            "fp16 runs without loss scaling, because the scaler is disabled: gradients below 6e-8 become zero. "
            f"Leave scaler out, or pass torch.amp.GradScaler({device.type!r}). (torch.amp.GradScaler() without a device means "
            "CUDA, and disables itself where there is none.)",
            HalfstepWarning,
            stacklevel=3,
        )
        return None
    return scaler
