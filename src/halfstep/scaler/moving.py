"""How a loss scale moves, on its device, without a wait for it."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._torch import update_scale_
from halfstep.errors import ConfigurationError
from halfstep.scaler.settings import ScalerSettings, check_scale

__all__ = ["checked_new_scale", "move_scale_"]


def move_scale_(scale: Tensor, *, growth_tracker: Tensor, tolerance: Tensor | None, found_inf: Tensor, settings: ScalerSettings) -> None:
    """Moves a scale by one verdict, in place, within its bounds.

    Args:
        scale: 0-dimensional float32, as the verdict.
        growth_tracker: 0-dimensional int32: updates in a row without a skip since the scale last moved.
        tolerance: 0-dimensional int32: skips that are still tolerated; `None` without hysteresis.
        found_inf: 1 if a gradient was not finite, 0 otherwise.
        settings: How it may move.

    Example:
        >>> scale, tracker = torch.full((), 8.0), torch.zeros((), dtype=torch.int32)
        >>> move_scale_(scale, growth_tracker=tracker, tolerance=None, found_inf=torch.ones(()), settings=ScalerSettings())
        >>> scale
        tensor(4.)
    """
    if tolerance is not None:
        bad = found_inf > 0
        tolerated = bad & (tolerance > 0)
        grows = ~bad & (growth_tracker + 1 >= settings.growth_interval)
        # torch's kernel counts a skip that it is not told of as a success: from -1 to 0.
        growth_tracker.masked_fill_(tolerated, -1)
        tolerance.sub_(tolerated.int()).masked_fill_(grows, settings.hysteresis)
        found_inf = (bad & ~tolerated).float()
    update_scale_(
        scale,
        growth_tracker,
        found_inf=found_inf,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
    )
    if settings.min_scale or settings.max_scale is not None:
        scale.clamp_(settings.floor, settings.ceiling)


def checked_new_scale(new_scale: object) -> float | Tensor:
    """Accepts what a user wants the scale to be.

    Returns:
        A number; or a 0-dimensional tensor if it lies on a device, which is not waited for to check it.

    Raises:
        InvalidTypeError: It is neither a number nor a tensor.
        ConfigurationError: It cannot be a scale.

    Example:
        >>> checked_new_scale(torch.tensor([2]))
        2.0
    """
    if isinstance(new_scale, torch.Tensor):
        if new_scale.numel() != 1 or new_scale.is_complex():
            raise ConfigurationError(
                f"update(new_scale) takes a number or a tensor with one element, not one of shape {tuple(new_scale.shape)} and "
                f"{new_scale.dtype}."
            )
        if new_scale.device.type != "cpu":
            return new_scale.detach().reshape(())
        new_scale = new_scale.item()
    return check_scale(new_scale, named="update(new_scale)")
