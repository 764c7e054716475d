"""The set-up of a training run, audited once: what would train the wrong thing, or nothing, without a word."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import torch_device_type
from halfstep.errors import ConfigurationError, HalfstepWarning, StepOrderError
from halfstep.hardware import native_precisions
from halfstep.records import Precision
from halfstep.scaler import LossScaler

__all__ = ["check_no_autocast", "check_not_stale", "check_parameters", "check_scaler_device", "check_weights", "warn_of_emulation"]


def check_weights(model: nn.Module) -> None:
    """Accepts a model whose trainable parameters are stored in fp32 or wider; frozen ones may be of any dtype.

    Raises:
        ConfigurationError: A trainable parameter is stored in half precision, where small updates are lost.
    """
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigurationError(
                f"The parameter {name!r} has no shape yet, as in lazy modules before their first batch. Run one batch through the model, "
                "and make the optimizer and the engine after that."
            )
        if parameter.requires_grad and parameter.is_floating_point() and parameter.element_size() < 4:
            raise ConfigurationError(
                f"The trainable parameter {name!r} is {parameter.dtype}. Mixed precision keeps trainable parameters in fp32 and lowers the "
                "operations instead, since small updates are lost in half precision. Call model.float() before making the optimizer."
            )


def check_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Accepts optimizers whose parameters are the model's.

    One that holds others was made for another model, or before this one was rebuilt, resized or sharded: it would train tensors that
    nobody uses, and the loss would not move. Where all of the model's own are there, too, the others may belong to a loss function: that
    is a warning.

    Raises:
        ConfigurationError: An optimizer holds parameters that are not the model's, and trainable ones of the model's are missing; or one
            parameter is in it twice.
    """
    own = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    _check_once_each([place for optimizer in optimizers for place in _places(optimizer)], own)
    what = check_not_stale(model, optimizers)
    if what:
        warnings.warn(
            f"{what} If they belong to a loss function or another part that is trained as well, put it and the model into one "
            "nn.ModuleList and pass that as the model; otherwise make the optimizer from model.parameters().",
            HalfstepWarning,
            stacklevel=3,
        )


def check_not_stale(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Accepts optimizers that were made for the model as it is now.

    Returns:
        What they hold beside its parameters, in a sentence; empty when it is nothing.

    Raises:
        ConfigurationError: They hold other parameters, and trainable ones of the model's are missing.
    """
    own = {id(parameter) for parameter in model.parameters()}
    held = [place for optimizer in optimizers for place in _places(optimizer)]
    foreign = [(where, parameter) for where, parameter in held if id(parameter) not in own]
    if not foreign:
        return ""
    where, parameter = foreign[0]
    what = (
        f"{len(foreign)} of the optimizer's {len(held)} parameters are not the model's; the first is {where}, of shape "
        f"{tuple(parameter.shape)}."
    )
    present = {id(parameter) for _, parameter in held}
    missing = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in present]
    if missing:
        raise ConfigurationError(
            f"{what} The model's {missing[0]!r} and {len(missing) - 1} more are in no group of it. If the optimizer was made for another "
            "model, or before this one was rebuilt, resized or sharded with fully_shard, make it from model.parameters() afterwards. If it "
            "also holds parameters of a loss function, put the model and that into one nn.ModuleList, and pass the list as the model."
        )
    return what


def _places(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f"parameter {index} of group {number}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]


def _check_once_each(held: Sequence[tuple[str, Tensor]], own: dict[int, str]) -> None:
    seen: set[int] = set()
    for where, parameter in held:
        if id(parameter) in seen:
            name = own.get(id(parameter), where)
            raise ConfigurationError(
                f"The parameter {name!r} is in several of the optimizers of one engine: it would be stepped twice. Give each parameter to "
                "one of them."
            )
        seen.add(id(parameter))


def check_scaler_device(scaler: torch.amp.GradScaler, *, device: torch.device) -> None:
    """Accepts a scaler for the device that the model is on.

    Raises:
        ConfigurationError: It was made for devices of another type.
    """
    made_for = scaler.device_type if isinstance(scaler, LossScaler) else torch_device_type(scaler)
    if made_for not in (None, device.type):
        raise ConfigurationError(
            f"The scaler was made for {made_for}, but the model is on {device}. Make it with {type(scaler).__name__}({device.type!r})."
        )


def warn_of_emulation(precision: Precision, *, device: torch.device) -> None:
    """Says so when a device only emulates fp16, which is many times slower than fp32."""
    if precision != "fp16":
        return
    native = native_precisions(device)
    if "fp16" not in native:
        what = "CPU" if device.type == "cpu" else "GPU"
        warnings.warn(
            f"fp16 on this {what} is emulated, which is many times slower than fp32. To train here, use {' or '.join(native)}.",
            HalfstepWarning,
            stacklevel=3,
        )


def check_no_autocast(device: torch.device, *, call: str) -> None:
    """Accepts a step outside of autocast regions.

    Within a region autocast keeps the lowered copies of the weights that it has made. A step in it changes the weights and not the
    copies: what follows computes with the old ones, and the loss does not move.

    Args:
        device: The model's device.
        call: What was called, for the message.

    Raises:
        StepOrderError: An autocast region that keeps copies is active.
    """
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise StepOrderError(
            f"{call} was called inside an autocast region. Autocast goes on with the lowered copies of the old weights until the region "
            "ends, so that the loss would not move. End the region after the loss: `with amp.autocast(): loss = ...`, then, outside of it, "
            "amp.backward(loss) and amp.step(). Around train_step() no region is needed."
        )
