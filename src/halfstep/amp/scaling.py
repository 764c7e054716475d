"""The backward pass: a scaled loss, and gradients that are unscaled and checked when it is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.amp.gradients import GradientsAside, scale_again_, unscale_
from halfstep.amp.session import Session, guards, logger, session
from halfstep.amp.skipping import StepGuard
from halfstep.casting import cast_tensors
from halfstep.errors import InvalidTypeError, StepOrderError
from halfstep.scaler import LossScaler

__all__ = ["master_params", "scale_loss"]


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer steps, to clip their gradients between `amp.scale_loss` and `optimizer.step()`.

    Args:
        optimizer: One that `amp.initialize` returned.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> [tuple(each.shape) for each in master_params(torch.optim.SGD(layer.parameters(), lr=0.1))]
        [(2, 2), (2,)]
    """
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,  # noqa: FBT001, FBT002 - as in Apex
    delay_overflow_check: bool = False,  # noqa: FBT001, FBT002 - as in Apex
) -> Iterator[Any]:
    """Gives the loss, multiplied by the loss scale, for its `backward()`; at the end of the block gradients are divided by it.

    If a gradient is not finite, the next `step()` of each of these optimizers does nothing, and the scale backs off. Gradients that were
    there before the block are put aside during it and added at its end, so that several losses with different scales can add up.

    Args:
        loss: A tensor of any shape; in half, it is cast to fp32 first.
        optimizers: All optimizers with parameters that this backward pass computes gradients of.
        loss_id: Which loss it is, from 0 to `num_losses - 1`; each has a scale of its own.
        model: Not used, as in Apex.
        delay_unscale: Whether gradients stay scaled at the end of the block, to be added to by the next one. It is never necessary.
        delay_overflow_check: Whether gradients are divided but nothing follows from what they are: the next block of these optimizers goes
            by it, too.

    Raises:
        StepOrderError: `amp.initialize` was not called, or not with these optimizers; or gradients of another scale are in the way.
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: There is no such `loss_id`.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> model, optimizer = amp.initialize(layer, torch.optim.SGD(layer.parameters(), lr=0.1), loss_scale=128.0)
        >>> with amp.scale_loss(model(torch.ones(3, 2)).mean(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
        >>> optimizer.step()
    """
    now = session(call="amp.scale_loss")
    if now.properties is None:
        yield loss
        return
    chosen = {optimizer: _guard_of(optimizer) for optimizer in _listed(optimizers)}
    scaler = now.scaler(loss_id)
    if _is_plain(now, scaler):
        yield cast_tensors(_checked(loss), torch.float32)
        return
    scale = scaler.scale_on(_checked(loss).device).clone()
    for optimizer, guard in chosen.items():
        _prepare(optimizer, guard, scale=scale, delays=delay_unscale)
    # Gradients that stay scaled are added to as they are.
    aside = GradientsAside([optimizer for optimizer, guard in chosen.items() if guard.scale is None])
    try:
        yield scaler.scale(loss)
    except BaseException:
        aside.restore()
        raise
    if delay_unscale:
        return
    found = unscale_(list(chosen), scale=scale, rechecks=scaler.settings.may_fall_below_one)
    aside.add()
    for guard in chosen.values():
        guard.scale = None
        found = found if guard.unchecked is None else torch.maximum(found, guard.unchecked.to(found.device))
    for guard in chosen.values():
        guard.unchecked = found if delay_overflow_check else None
    if not delay_overflow_check:
        _conclude(now, chosen, loss_id=loss_id, found=found)


def _prepare(optimizer: Optimizer, guard: StepGuard, *, scale: Tensor, delays: bool) -> None:
    """Accepts gradients that scaled ones can be added to; where they are to stay scaled, those that there are become so first."""
    if guard.scale is not None and all(each.grad is None for each in master_params(optimizer)):
        guard.scale = None  # They were cleared in between.
    guard.check_scale(scale)
    if delays and guard.scale is None:
        scale_again_(optimizer, scale=scale)
        guard.scale = scale


def _conclude(now: Session, chosen: Mapping[Optimizer, StepGuard], *, loss_id: int, found: Tensor) -> None:
    """Moves the scale of a loss, and has the next step of the optimizers skipped, by what was found in the gradients."""
    scaler = now.scaler(loss_id)
    overflow = bool(found.item())
    scaler.record_step(found, skipped=overflow)
    scaler.update()
    if not overflow:
        return
    for optimizer, guard in chosen.items():
        guard.skip_next(optimizer)
    if now.verbose:
        logger.info("A gradient overflowed: the next step is skipped, and the scale of loss %d is now %g.", loss_id, scaler.get_scale())


def _is_plain(now: Session, scaler: LossScaler) -> bool:
    """Whether the loss is not scaled and nobody asked for a check, as in fp32: then nothing is done at all, as in Apex."""
    return now.properties is not None and not now.properties.master_weights and scaler.settings.static and scaler.settings.init_scale == 1


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise InvalidTypeError(f"amp.scale_loss(loss, ...) takes a tensor, not a {type(loss).__name__}.")
    return loss


def _listed(optimizers: Any) -> list[Optimizer]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(listed, list | tuple) or not all(isinstance(each, Optimizer) for each in listed):
        raise InvalidTypeError(f"amp.scale_loss(loss, optimizers) takes an optimizer or a list of optimizers, not {optimizers!r:.80}.")
    return list(listed)


def _guard_of(optimizer: Optimizer) -> StepGuard:
    guard = guards.get(optimizer)
    if guard is None:
        raise StepOrderError(
            f"This {type(optimizer).__name__} was not passed to amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) with all models and optimizers first, and use what it returns."
        )
    return guard
