"""`LossScaler`: torch's GradScaler with bounds, patience and exact counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError
from halfstep.records import ScalerStats
from halfstep.scaler.counts import SkipCounts, Verdict, too_many_skips
from halfstep.scaler.gradients import check_finite_, collect_gradients, unscale_gradients_
from halfstep.scaler.moving import checked_new_scale, move_scale_
from halfstep.scaler.settings import ScalerSettings, check_device
from halfstep.scaler.state import ScalerState
from halfstep.scaler.stepping import identity_of, leaves_verdict_on_device, refuse_closure, step_on_device

__all__ = ["LossScaler"]


@final
class LossScaler(torch.amp.GradScaler):
    """A loss scaler for fp16 that cannot destroy weights in silence, and that knows exactly which steps it skipped.

    It goes wherever a `torch.amp.GradScaler` goes, and moves its scale by the same arithmetic. What it adds:

    - a floor and a ceiling. Below 1 the scale amplifies gradients, and below 2**-128 torch's scaler writes infinities into the weights;
      where the floor is lower than 1, unscaled gradients are checked again;
    - `hysteresis`, a `static` scale, and an end to endless skipping: `max_consecutive_skips`;
    - exact counts of steps and skips in `stats()`, with fused optimizers too, kept on the device until they are read;
    - arguments that are checked, and calls in a wrong order that raise: an optimizer and a wrapper round it are one, gradients that change
      after `unscale_` are checked again, an optimizer without gradients is no error, closures are refused in any form;
    - a state that, loaded, continues the run and leaves the settings of this run as they are.

    Args:
        device: `cpu` or `cuda`; `None` for the device of the first tensor that is scaled.
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after `growth_interval` updates in a row without a skip.
        backoff_factor: What it is multiplied by after a skip.
        growth_interval: Updates in a row without a skip after which it grows.
        min_scale: The scale never falls below it; 0 for no floor, as torch has none.
        max_scale: The scale never rises above it; `None` for no ceiling.
        hysteresis: Skips that are tolerated before the scale backs off, as in Megatron-LM: once used up, they are granted again when the
            scale grows.
        static: The scale never moves.
        max_consecutive_skips: Updates in a row with a skip at which `update` raises; `None` for never.
        enabled: With `False` nothing is scaled or checked, and `step` is the optimizer's.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed, or CUDA is asked for where there is none.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> scaler, optimizer = LossScaler("cpu", init_scale=8.0), torch.optim.SGD([weight], lr=0.5)
        >>> for factor in (1.0, float("inf")):
        ...     optimizer.zero_grad()
        ...     scaler.scale(weight * factor).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> weight.item(), scaler.stats()
        (0.5, ScalerStats(steps=2, skips=1, consecutive_skips=1, scale=4.0))
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        hysteresis: int = 0,
        static: bool = False,
        max_consecutive_skips: int | None = None,
        enabled: bool = True,
    ) -> None:
        # torch's own state stays that of a disabled scaler: each of its public methods is replaced below.
        super().__init__(check_device(device) or "cpu", enabled=False)
        if not isinstance(enabled, bool):
            raise InvalidTypeError(f"LossScaler(enabled=...) takes True or False, not {enabled!r}.")
        self._device_type = device
        self._has_scaled = False
        self._enabled = enabled  # By this name, since other libraries read it from a scaler.
        self._settings = ScalerSettings(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            static=static,
            max_consecutive_skips=max_consecutive_skips,
        )
        self._begin(ScalerState.first(self._settings))

    def _begin(self, state: ScalerState) -> None:
        """Makes a state that was read the one to go on from; tensors are made on the device that is met first."""
        self._state = state
        self._counts = SkipCounts(
            limit=self._settings.max_consecutive_skips, steps=state.steps, skips=state.skips, consecutive=state.consecutive_skips
        )
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._tolerance: Tensor | None = None
        self._verdicts: dict[int, Verdict] = {}
        self._finished: list[Verdict] = []  # Of steps that were recorded rather than taken.

    @property
    def settings(self) -> ScalerSettings:
        """How the scale may move."""
        return self._settings

    @property
    def device_type(self) -> str | None:
        """The device type that it was made for; `None` for that of whatever is scaled first."""
        return self._device_type

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or a nest of lists and tuples of tensors, by the scale.

        Half-precision tensors come out in fp32, in which the product does not overflow.

        Args:
            outputs: A tensor of any shape, or an iterable of such.

        Raises:
            InvalidTypeError: It is neither.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            scale = self.scale_on(outputs.device)
            if scale.device != outputs.device:
                scale = scale.to(outputs.device, non_blocking=True)
            if outputs.dtype in (torch.float16, torch.bfloat16):
                outputs = outputs.float()
            return outputs * scale
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | Mapping):
            scaled = [self.scale(each) for each in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        raise InvalidTypeError(f"scale(...) takes a tensor or an iterable of tensors, not a {type(outputs).__name__}.")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, and checks that they are finite; waits for no device.

        Args:
            optimizer: It, or a wrapper round it that has its `param_groups`.

        Raises:
            StepOrderError: They are unscaled already, the optimizer has stepped since the last `update`, or no loss was ever scaled.
            ConfigurationError: A gradient is stored in half precision.
        """
        if not self._enabled:
            return
        verdict = self._verdict(optimizer)
        if verdict.stepped:
            raise StepOrderError("unscale_() was called after step(): call update() first, once after the last step of an iteration.")
        if verdict.unscaled:
            raise StepOrderError(
                "unscale_() was called twice for one optimizer since the last update(): its gradients are unscaled already. Call it once, "
                "after the last backward() of an iteration."
            )
        gradients = collect_gradients(optimizer.param_groups)
        if not gradients:
            return
        if not self._has_scaled:
            raise StepOrderError("No loss was scaled yet: call scaler.scale(loss).backward(), in place of loss.backward(), before this.")
        found_inf = self.found_inf(optimizer)
        unscale_gradients_(gradients, scale=self.scale_on(found_inf.device), found_inf=found_inf)
        verdict.unscaled = True
        if self._settings.may_fall_below_one:  # Divided by a scale below 1, a finite gradient may have become infinite.
            check_finite_(gradients, found_inf=found_inf)

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """The verdict on an optimizer's gradients since the last `update`.

        It is the tensor by which `step` and `update` decide: whoever knows better, such as another process, writes into it.

        Returns:
            0-dimensional float32 on the scale's device: 1 if a gradient was not finite, 0 otherwise.
        """
        verdict = self._verdict(optimizer)
        if verdict.found_inf is None:
            device: torch.device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
            verdict.found_inf = torch.zeros((), dtype=torch.float32, device=self.scale_on(device).device)
        return verdict.found_inf

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer with unscaled gradients, or skips the step when one of them is not finite.

        Gradients are unscaled first if `unscale_` was not called. If it was, they are checked again, because whoever called it may have
        changed them. Fused optimizers read the verdict on the device, any other makes the host wait for it.

        Args:
            optimizer: It, or a wrapper round it that has its `param_groups`.
            args: For `optimizer.step`.
            kwargs: For `optimizer.step`.

        Returns:
            What `optimizer.step` returned; `None` when the host knows that it was skipped.

        Raises:
            StepOrderError: The optimizer has stepped since the last `update`, or no loss was ever scaled.
            ConfigurationError: A closure was passed, which would compute gradients that nobody unscales.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        refuse_closure(args, kwargs)
        verdict = self._verdict(optimizer)
        if verdict.stepped:
            raise StepOrderError("step() was called twice for one optimizer since the last update(). Call update() once, after all steps.")
        if not verdict.unscaled:
            self.unscale_(optimizer)
        elif verdict.found_inf is not None:
            check_finite_(collect_gradients(optimizer.param_groups), found_inf=verdict.found_inf)
        found_inf = verdict.found_inf
        if found_inf is not None and leaves_verdict_on_device(optimizer):
            result = step_on_device(optimizer, found_inf, *args, **kwargs)
        else:
            verdict.skipped = found_inf is not None and bool(found_inf.item())
            result = None if verdict.skipped else optimizer.step(*args, **kwargs)
        verdict.stepped = True
        return result

    def record_step(self, found_inf: Tensor | None, *, skipped: bool | None) -> None:
        """Counts a step that somebody else took, or skipped, with gradients unscaled by this scale; the next `update` goes by it, too.

        Args:
            found_inf: 0-dimensional float32 on the scale's device: 1 if a gradient was not finite, 0 otherwise; `None` without gradients.
            skipped: Whether the step was not taken; `None` while only the device knows.
        """
        self._finished.append(Verdict((), found_inf, stepped=True, skipped=skipped))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by what was found in the gradients since the last update; call it once, at the end of an iteration.

        Called after each of several optimizers, it moves the scale under the gradients of the later ones, as in torch. Without any verdict
        since the last update nothing changes, which is no error.

        Args:
            new_scale: A scale to use from now on, brought to between `min_scale` and `max_scale`; `None` to let the scaler decide.

        Raises:
            InvalidTypeError: `new_scale` is neither a number nor a tensor.
            ConfigurationError: `new_scale` cannot be a scale, or the scaler is static.
            PersistentSkipsError: So many updates in a row saw gradients that were not finite as `max_consecutive_skips` allows.
        """
        if not self._enabled:
            return
        verdicts = [*self._finished, *self._verdicts.values()]
        if new_scale is not None:
            self._set_scale(new_scale)
        elif not self._settings.static and (founds := [each.found_inf for each in verdicts if each.found_inf is not None]):
            found_inf = founds[0] if len(founds) == 1 else torch.stack(founds).amax()
            scale, tracker = self.scale_on(found_inf.device), cast("Tensor", self._growth_tracker)
            move_scale_(scale, growth_tracker=tracker, tolerance=self._tolerance, found_inf=found_inf, settings=self._settings)
        self.discard()
        reached = self._counts.add(verdicts)
        if reached is not None:
            raise too_many_skips(reached, limit=self._settings.max_consecutive_skips, scale=self.get_scale())

    def _set_scale(self, new_scale: object) -> None:
        settings = self._settings
        if settings.static:
            raise ConfigurationError("update(new_scale): this scaler is static, so its scale stays. Make one with another init_scale.")
        value = checked_new_scale(new_scale)
        if isinstance(value, Tensor):
            self.scale_on(value.device).copy_(value).clamp_(settings.floor, settings.ceiling)
        elif self._scale is None:
            self._state = replace(self._state, scale=settings.clamped(value))
        else:
            self._scale.fill_(settings.clamped(value))

    def discard(self) -> None:
        """Forgets the iteration in progress, as if nothing had been unscaled or stepped since the last `update`; the scale stays."""
        self._verdicts = {}
        self._finished = []

    def scale_on(self, device: torch.device) -> Tensor:
        """The tensor that holds the scale, 0-dimensional float32; it is made on this device if there is none yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return cast("Tensor", self._scale)

    def counters_on(self, device: torch.device) -> list[Tensor]:
        """What else moves with the scale, 0-dimensional float32 each: the growth tracker, and with hysteresis the skips still tolerated."""
        self.scale_on(device)
        return [tensor.float() for tensor in (self._growth_tracker, self._tolerance) if tensor is not None]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        # By torch's name for it, because Accelerate calls it after loading a state.
        self._has_scaled = True
        self._scale = torch.full((), self._state.scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._state.growth_tracker, dtype=torch.int32, device=dev)
        if self._settings.hysteresis:
            self._tolerance = torch.full((), self._state.tolerance, dtype=torch.int32, device=dev)

    def _verdict(self, optimizer: Optimizer) -> Verdict:
        key = identity_of(optimizer)
        return self._verdicts.setdefault(id(key), Verdict(key))

    def _read(self) -> ScalerState:
        """The state now, read from the device at once."""
        own = [tensor for tensor in (self._scale, self._growth_tracker, self._tolerance) if tensor is not None]
        tensors = [*own, *self._counts.tensors()]
        values = torch.stack([tensor.to(tensors[0].device, torch.float64) for tensor in tensors]).tolist() if tensors else []
        kinds: dict[str, type] = {"scale": float, "growth_tracker": int, "tolerance": int}
        held: dict[str, Any] = {name: kind(value) for (name, kind), value in zip(kinds.items(), values[: len(own)], strict=False)}
        steps, skips, consecutive = self._counts.read(values[len(own) :])
        return replace(self._state, **held, steps=steps, skips=skips, consecutive_skips=consecutive)

    def stats(self) -> ScalerStats:
        """Steps, skips and the scale, exact; reading them waits for the device once."""
        now = self._read()
        scale = now.scale if self._enabled else 1.0
        return ScalerStats(steps=now.steps, skips=now.skips, consecutive_skips=now.consecutive_skips, scale=scale)

    def get_scale(self) -> float:
        """The scale now, or 1.0 when disabled; waits for the device."""
        scale = self._state.scale if self._scale is None else self._scale.item()
        return scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._settings.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by when it grows; above 1."""
        self._settings = replace(self._settings, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after a skip."""
        return self._settings.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by after a skip; between 0 and 1."""
        self._settings = replace(self._settings, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Updates in a row without a skip after which the scale grows."""
        return self._settings.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the updates in a row without a skip after which the scale grows; from 1."""
        self._settings = replace(self._settings, growth_interval=new_interval)
        # torch's kernel compares with the interval for equality.
        self._state = replace(self._state, growth_tracker=min(self._state.growth_tracker, new_interval - 1))
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        """The settings and the state: torch's five entries, which its own scaler can load, and halfstep's; empty when disabled."""
        return self._read().as_dict(self._settings) if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, adopt_settings: bool = False) -> None:
        """Goes on from a state of this class or of a `torch.amp.GradScaler`.

        A scale that lies beyond this run's bounds is brought back to them, with a warning. A static scale is a setting, so it stays.

        Args:
            state_dict: What `state_dict()` of either returned.
            adopt_settings: Whether to take over the settings in it, too; by default those of this run stay, other than in torch.

        Raises:
            StepOrderError: An iteration is in progress.
            InvalidTypeError: It is no mapping, or an entry is of the wrong type.
            ConfigurationError: It is empty, as that of a disabled scaler, or an entry is missing or not allowed. Nothing was changed.
        """
        if not self._enabled:
            ScalerState.warn_unused(state_dict)
            return
        if any(verdict.unscaled or verdict.stepped for verdict in (*self._verdicts.values(), *self._finished)):
            raise StepOrderError("load_state_dict() was called between unscale_() or step() and update(): call it between iterations.")
        settings, state = ScalerState.parse(state_dict, settings=self._settings, adopt_settings=adopt_settings)
        self._settings = settings
        device = None if self._scale is None else self._scale.device
        self._begin(state)
        if device is not None:
            self._lazy_init_scale_growth_tracker(device)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy goes on from. The iteration in progress is no part of it."""
        return {"device": self._device_type, "enabled": self._enabled, "kept": (self._settings, self._has_scaled), "state": self._read()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"], enabled=state["enabled"])
        self._settings, self._has_scaled = state["kept"]
        self._begin(state["state"])
