"""What an engine checks and settles once, when it is made."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed import Ranks
from halfstep.engine.audit import check_scaler_device
from halfstep.engine.closures import ClosureKind
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.hardware import check_device
from halfstep.records import Precision, StepRecord
from halfstep.scaler import LossScaler

__all__ = [
    "Scheduler",
    "as_callbacks",
    "as_optimizers",
    "as_schedulers",
    "check_closure",
    "check_loss",
    "check_settings",
    "checking_scaler",
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


def as_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """The optimizers that one engine steps together.

    Raises:
        InvalidTypeError: It is neither an optimizer nor a sequence of them.
        ConfigurationError: It is an empty sequence, or one with an optimizer that evaluates closures.
    """
    given: Any = optimizer
    several = given if isinstance(given, list | tuple) else [given]
    for each in several:
        if not isinstance(each, Optimizer):
            raise InvalidTypeError(f"MixedPrecision(optimizer=...) takes a torch.optim.Optimizer, or several, not a {type(each).__name__}.")
    if not several:
        raise ConfigurationError("MixedPrecision(optimizer=[]): at least one optimizer is needed.")
    return tuple(several)


def check_closure(kind: ClosureKind, *, optimizers: Sequence[Optimizer], ranks: Ranks | None) -> None:
    """Accepts an optimizer that evaluates closures where one can be driven.

    Raises:
        ConfigurationError: It would have to step together with others, or search along a line on several ranks.
    """
    if kind == "none":
        return
    name = type(optimizers[0]).__name__
    if len(optimizers) > 1:
        raise ConfigurationError(f"{name} computes gradients several times in its step, so it cannot step together with other optimizers.")
    if kind == "all" and ranks is not None:
        raise ConfigurationError(
            f"{name} searches by the loss, which differs from rank to rank, so the ranks would part. Train with it in one process."
        )


def as_schedulers(scheduler: Scheduler | Sequence[Scheduler] | None, *, optimizers: Sequence[Optimizer]) -> tuple[Scheduler, ...]:
    """The schedulers that move with each step that is taken.

    Args:
        scheduler: One, several or none.
        optimizers: The engine's.

    Raises:
        InvalidTypeError: One has no `step` method.
        ConfigurationError: One moves by a metric, or schedules another optimizer.
    """
    given: Any = scheduler
    several = () if given is None else given if isinstance(given, list | tuple) else (given,)
    for each in several:
        _check_scheduler(each)
        scheduled = getattr(each, "optimizer", None)
        own = {id(group) for optimizer in optimizers for group in optimizer.param_groups}  # A wrapper shares those of what is in it.
        if isinstance(scheduled, Optimizer) and not any(id(group) in own for group in scheduled.param_groups):
            raise ConfigurationError(
                f"The {type(each).__name__} schedules another {type(scheduled).__name__} than this engine steps: its learning rate would "
                "never move. Make the scheduler from the optimizer that is passed here."
            )
    return tuple(several)


def as_callbacks(on_step: Callable[..., object] | Sequence[Callable[..., object]]) -> tuple[Callable[[StepRecord], object], ...]:
    """What to call after each step that is taken, each as a function of the step's record.

    Raises:
        InvalidTypeError: One cannot be called.
    """
    given: Any = on_step
    several = given if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not callable(each):
            raise InvalidTypeError(f"MixedPrecision(on_step=...) takes functions to call after a step, not a {type(each).__name__}.")
    return tuple(each if _takes_record(each) else _without_record(each) for each in several)


def _takes_record(callback: Callable[..., object]) -> bool:
    """Whether a function has a positional parameter without a default, which the record is for.

    Raises:
        InvalidTypeError: It has more of them, or others that nothing is passed for.
    """
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):  # Some built-in functions do not tell.
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is inspect.Parameter.empty and each.kind not in variable]
    if len(needed) > 1 or any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in needed):
        listed = ", ".join(each.name for each in needed)
        raise InvalidTypeError(
            f"MixedPrecision(on_step=...) takes functions of nothing, or of the step's record alone; {callback!r} also needs {listed}."
        )
    return bool(needed)


def _without_record(callback: Callable[..., object]) -> Callable[[StepRecord], object]:
    return lambda _: callback()


def check_settings(
    *,
    max_grad_norm: float | None,
    max_grad_value: float | None,
    accumulate: int,
    retries: int,
    max_consecutive_skips: int | None,
    diagnose_after: int | None,
    **switches: object,
) -> None:
    """Accepts the settings of an engine that need nothing else to be judged by; `switches` are those that are true or false.

    Raises:
        InvalidTypeError: One is of the wrong type.
        ConfigurationError: One has a value that is not allowed.
    """
    _check_clipping(max_grad_norm=max_grad_norm, max_grad_value=max_grad_value)
    _check_switches(**switches)
    _check_counts(accumulate=accumulate, retries=retries, max_consecutive_skips=max_consecutive_skips, diagnose_after=diagnose_after)


def _check_switches(**switches: object) -> None:
    """Accepts `True` and `False`.

    Raises:
        InvalidTypeError: One is something else.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"MixedPrecision({name}=...) takes True or False, not {value!r}.")


def _check_scheduler(scheduler: object) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau moves by a metric, not by a step. Leave it out of MixedPrecision and call "
            "scheduler.step(validation_loss) yourself after each validation."
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(f"MixedPrecision(scheduler=...) takes an object with a step() method, not a {type(scheduler).__name__}.")


def _check_clipping(*, max_grad_norm: float | None, max_grad_value: float | None) -> None:
    """Accepts positive numbers, or `None`; the norm may be infinite.

    Raises:
        InvalidTypeError: One is no number.
        ConfigurationError: One is not above 0, or the value is infinite.
    """
    for name, value, what in (("max_grad_norm", max_grad_norm, "norm"), ("max_grad_value", max_grad_value, "value")):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidTypeError(f"MixedPrecision({name}=...) takes a number or None, not {value!r}.")
        if math.isnan(value) or value <= 0 or (what == "value" and math.isinf(value)):
            raise ConfigurationError(f"MixedPrecision({name}={value!r}): the largest allowed {what} must be above 0; None switches it off.")


def _check_counts(*, accumulate: int, retries: int, max_consecutive_skips: int | None, diagnose_after: int | None) -> None:
    """Accepts whole numbers: micro-batches from 1, retries from 0, skips in a row from 1 or `None`.

    Raises:
        InvalidTypeError: One is no whole number.
        ConfigurationError: One is too small.
    """
    for name, value, lowest, what in (
        ("accumulate", accumulate, 1, "the number of micro-batches in a step"),
        ("retries", retries, 0, "the number of times that a skipped step is tried again"),
        ("max_consecutive_skips", max_consecutive_skips, 1, "the number of skips in a row that ends the run"),
        ("diagnose_after", diagnose_after, 1, "the number of skips in a row that is diagnosed"),
    ):
        if value is None and name in ("max_consecutive_skips", "diagnose_after"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidTypeError(f"MixedPrecision({name}=...) takes a whole number, not {value!r}.")
        if value < lowest:
            raise ConfigurationError(f"MixedPrecision({name}={value}): {what} is {lowest} or more.")


def settle_scaler(
    scaler: torch.amp.GradScaler | None, *, requested: str, precision: Precision, device: torch.device, max_consecutive_skips: int | None
) -> torch.amp.GradScaler | None:
    """The scaler that losses are scaled with: a `LossScaler` for fp16 unless one was given, and none for fp32 and bf16.

    Args:
        scaler: What the user gave.
        requested: The precision as the user named it; with `auto`, a scaler that turns out not to be needed is left aside.
        precision: The precision that it means here.
        device: The model's device.
        max_consecutive_skips: For a scaler that is made here.

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
        return LossScaler(max_consecutive_skips=max_consecutive_skips)
    if not enabled:
        warnings.warn(
            "fp16 runs without loss scaling, because the scaler is disabled: gradients below 6e-8 become zero. "
            f"Leave scaler out, or pass halfstep.LossScaler({device.type!r}). (torch.amp.GradScaler() without a device means "
            "CUDA, and disables itself where there is none.)",
            HalfstepWarning,
            stacklevel=3,
        )
        return None
    check_scaler_device(scaler, device=device)
    return scaler


def checking_scaler(*, max_consecutive_skips: int | None) -> LossScaler:
    """A scaler of scale 1 that never moves: it checks that gradients are finite, and counts the steps that it skips."""
    return LossScaler(init_scale=1.0, static=True, max_consecutive_skips=max_consecutive_skips)


def check_loss(loss: object) -> None:
    """Accepts a scalar tensor that gradients can be computed of.

    Raises:
        InvalidTypeError: It is no tensor.
        ConfigurationError: It is no scalar, or needs no gradient.
    """
    if not isinstance(loss, Tensor):
        raise InvalidTypeError(f"The loss must be a scalar tensor, not a {type(loss).__name__}.")
    if loss.dim():
        raise ConfigurationError(
            f"The loss must be a scalar tensor, not one of shape {tuple(loss.shape)}. Reduce it, for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "The loss needs no gradient, so backward() would change nothing: it was computed under no_grad, detached, rebuilt from a "
            "Python number, or no parameter that it depends on requires a gradient."
        )
