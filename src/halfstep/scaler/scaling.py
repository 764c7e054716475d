"""How an engine goes from scaled gradients to a step: with halfstep's own scaler or one of torch's, with one optimizer or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import check_and_unscale_, has_found_infs, record_found_inf, torch_scale
from halfstep.scaler.gradients import are_simple, check_finite_, collect_gradients, unscale_gradients_
from halfstep.scaler.loss_scaler import LossScaler
from halfstep.scaler.stepping import leaves_verdict_on_device, step_on_device

__all__ = ["Scaling"]


@final
class Scaling:
    """The part of a loss scaler in the steps of some optimizers that step together: all of them, or none.

    The scaler itself only scales losses and moves its scale: until a step ends it knows nothing of it, so that a step that breaks off in
    the middle leaves no trace in it.

    Args:
        scaler: Any `torch.amp.GradScaler`; with a static `LossScaler` of scale 1 the gradients are checked and nothing else.
        optimizers: Those that step together.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> scaling = Scaling(LossScaler("cpu", init_scale=8.0), [torch.optim.SGD([weight], lr=0.5)])
        >>> scaling.scale(weight * float("inf")).backward()
        >>> scaling.unscale([weight.grad]), scaling.step(on_host=True), weight.item()
        (tensor(1.), True, 1.0)
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer]) -> None:
        self._scaler = scaler
        self._own = scaler if isinstance(scaler, LossScaler) else None
        self._optimizers = tuple(optimizers)
        self._one: Tensor | None = None
        self._found: Tensor | None = None

    @property
    def found_inf(self) -> Tensor | None:
        """The verdict of the step in progress: 0-dimensional float32, 1 if a gradient was not finite, 0 otherwise; `None` without one."""
        return self._found

    def _kind(self) -> tuple[bool, bool]:
        """Whether the gradients are only checked, and whether they are checked again once they are divided."""
        if self._own is None:
            return False, True  # torch's scaler has no floor: divided by a scale below 1, a finite gradient may become infinite.
        settings = self._own.settings  # A loaded state may have brought others.
        return settings.static and settings.init_scale == 1, settings.may_fall_below_one

    @property
    def param_groups(self) -> list[Mapping[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def scale(self, tensor: Tensor) -> Tensor:
        """The tensor multiplied by the scale."""
        return self._scaler.scale(tensor)

    def scale_on(self, device: torch.device) -> Tensor:
        """The tensor that holds the scale, 0-dimensional float32, which the scaler writes to in place; made there if there is none yet."""
        if self._own is not None:
            return self._own.scale_on(device)
        scale = torch_scale(self._scaler)
        if scale is None:
            self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))
            scale = torch_scale(self._scaler)
        assert scale is not None
        return scale

    def state_on(self, device: torch.device) -> Tensor:
        """The scale and, for a `LossScaler`, its growth tracker and the skips that it still tolerates, as one float32 tensor."""
        scale = self.scale_on(device)
        return torch.stack((scale,) if self._own is None else (scale, *self._own.counters_on(device)))

    def leaves_verdict_on_device(self) -> bool:
        """Whether the host need not know whether the step in progress will be taken."""
        if len(self._optimizers) == 1:
            return leaves_verdict_on_device(self._optimizers[0])
        return all(map(leaves_verdict_on_device, self._optimizers))

    def unscale(self, gradients: list[Tensor], *, factor: Tensor | None = None) -> Tensor | None:
        """Divides the gradients by the scale, in place.

        Args:
            gradients: Those of the optimizers' parameters, without the missing ones.
            factor: What they are multiplied by besides, 0-dimensional float32; `None` for 1.

        Returns:
            The verdict by which `step` goes, for others to write into: 0-dimensional float32 on the scale's device, 1 if a gradient was not
            finite, 0 otherwise. `None` without gradients.

        Raises:
            ConfigurationError: A gradient is stored in half precision.
        """
        self._found = None
        if not gradients:
            return None
        checks_only, rechecks = self._kind()
        device = gradients[0].device
        scale = None if checks_only else self.scale_on(device)
        if factor is not None or not are_simple(gradients) or (scale is not None and scale.device != device):
            return self._unscale_all(self.scale_on(device), factor=factor, rechecks=rechecks)
        # The common case, without a detour: in a small model the detours are what a step takes.
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), dtype=torch.float32, device=device)
        self._found = found = torch.zeros((), dtype=torch.float32, device=device)
        inverse = self._one if scale is None else scale.double().reciprocal().float()
        check_and_unscale_(gradients, found_inf=found, inverse_scale=inverse)
        if rechecks and scale is not None:
            check_and_unscale_(gradients, found_inf=found, inverse_scale=self._one)
        return found

    def _unscale_all(self, scale: Tensor, *, factor: Tensor | None, rechecks: bool) -> Tensor:
        groups = collect_gradients(self.param_groups)
        self._found = torch.zeros((), dtype=torch.float32, device=scale.device)
        unscale_gradients_(groups, scale=scale, found_inf=self._found, factor=factor)
        if rechecks:
            check_finite_(groups, found_inf=self._found)
        return self._found

    def check_norm(self, norm: Tensor) -> None:
        """Lets a norm that is not finite count as a gradient that is not: clipping by it made zeros, or NaN, of all of them.

        Args:
            norm: 0-dimensional.
        """
        found = self._found
        if found is None:
            return
        if self._one is not None and norm.device == found.device == self._one.device and norm.dtype is torch.float32:
            check_and_unscale_([norm], found_inf=found, inverse_scale=self._one)
        else:
            check_finite_({(norm.device, norm.dtype): [norm]}, found_inf=found)

    def verdict(self, device: torch.device) -> Tensor:
        """The verdict, for others to write into, also where there are no gradients to judge."""
        if self._found is None:
            self._found = torch.zeros((), dtype=torch.float32, device=self.scale_on(device).device)
        return self._found

    def check_again(self) -> None:
        """Checks gradients that somebody may have changed since they were unscaled."""
        if self._found is not None:
            check_finite_(collect_gradients(self.param_groups), found_inf=self._found)

    def step(self, *, on_host: bool) -> bool | None:
        """Steps the optimizers, or skips the step, by the verdict, and tells the scaler.

        Args:
            on_host: Whether the answer is needed at once, which makes the host wait for the device.

        Returns:
            Whether the step was skipped; `None` while only the device knows.
        """
        found = self._found
        skipped: bool | None = None
        if found is not None and not on_host and self.leaves_verdict_on_device():
            for optimizer in self._optimizers:
                step_on_device(optimizer, found)
        else:
            skipped = found is not None and bool(found.item())
            if not skipped:
                for optimizer in self._optimizers:
                    optimizer.step()
        self.record(skipped=skipped)
        return skipped

    def record(self, *, skipped: bool | None) -> None:
        """Tells the scaler of a step that was taken or skipped by the verdict."""
        if self._own is not None:
            self._own.record_step(self._found, skipped=skipped)
        elif self._found is not None:
            record_found_inf(self._scaler, self, self._found)
        self._found = None

    def update(self) -> None:
        """Has the scaler move its scale by every step that it was told of; nothing happens when it was told of none.

        Raises:
            PersistentSkipsError: So many in a row were skipped as the scaler allows.
        """
        if self._own is not None or has_found_infs(self._scaler):
            self._scaler.update()
