"""What a loss scaler goes on from after an interruption."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from typing import Any, Final, cast, final

from typing_extensions import Self

from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError
from halfstep.scaler.settings import ScalerSettings, check_scale

__all__ = ["ScalerState"]

# What torch calls it.
_TORCH_NAMES: Final = {"growth_tracker": "_growth_tracker"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """What a loss scaler goes on from.

    Attributes:
        scale: The loss scale.
        growth_tracker: Updates in a row without a skip since the scale last moved.
        tolerance: Skips that are still tolerated before the scale backs off.
        steps: Optimizer steps that were asked for.
        skips: How many of them were not taken.
        consecutive_skips: Updates in a row that each saw a gradient which was not finite.
    """

    scale: float
    growth_tracker: int = 0
    tolerance: int = 0
    steps: int = 0
    skips: int = 0
    consecutive_skips: int = 0

    @classmethod
    def first(cls, settings: ScalerSettings) -> Self:
        """That of a scaler which has seen nothing.

        Example:
            >>> ScalerState.first(ScalerSettings(init_scale=8.0)).scale
            8.0
        """
        return cls(scale=settings.init_scale, tolerance=settings.hysteresis)

    def as_dict(self, settings: ScalerSettings) -> dict[str, Any]:
        """State and settings in one flat dictionary; a `torch.amp.GradScaler` finds its five entries in it."""
        return {**settings.as_dict(), **{_TORCH_NAMES.get(name, name): value for name, value in asdict(self).items()}}

    @classmethod
    def parse(cls, saved: object, *, settings: ScalerSettings, adopt_settings: bool) -> tuple[ScalerSettings, Self]:
        """The settings and the state that a loaded dictionary means.

        Args:
            saved: What a `LossScaler` or a `torch.amp.GradScaler` gave as its state.
            settings: Those of this run.
            adopt_settings: Whether the settings in `saved` replace them.

        Raises:
            InvalidTypeError: It is no mapping, or an entry is of the wrong type.
            ConfigurationError: It is empty, or an entry is missing or not allowed.
        """
        if not isinstance(saved, Mapping):
            raise InvalidTypeError(f"A scaler's state is a dictionary, as state_dict() returns it, not a {type(saved).__name__}.")
        if not saved:
            raise ConfigurationError(
                "The scaler's state is empty: it was saved by a disabled scaler. Without it the scale starts afresh; to accept that, do "
                "not load it."
            )
        if missing := [name for name in ("scale", "_growth_tracker") if name not in saved]:
            raise ConfigurationError(
                f"The scaler's state has no entry {missing[0]!r}, but {', '.join(map(repr, saved)) or 'none'}. Load what state_dict() of a "
                "LossScaler or a torch.amp.GradScaler returned."
            )
        if adopt_settings:
            settings = _adopted(saved, settings)
        counts = {
            field.name: _count(_TORCH_NAMES.get(field.name, field.name), saved)
            for field in fields(cls)
            if field.name != "scale" and _TORCH_NAMES.get(field.name, field.name) in saved
        }
        scale = saved["scale"]
        if scale != 0 or settings.min_scale:  # Without a floor, a scale can fall so far.
            scale = check_scale(scale, named="The scaler's state, entry 'scale'")
        state = cls(**{"scale": scale, "tolerance": settings.hysteresis, **cast("dict[str, Any]", counts)})
        return settings, state._within(settings)

    def _within(self, settings: ScalerSettings) -> Self:
        scale = settings.init_scale if settings.static else settings.clamped(self.scale)
        if scale != self.scale and not settings.static:
            warnings.warn(
                f"The loaded loss scale {self.scale:g} lies outside of this run's bounds, min_scale={settings.min_scale:g} and "
                f"max_scale={settings.max_scale}; the run goes on with {scale:g}.",
                HalfstepWarning,
                stacklevel=4,
            )
        tracker = min(self.growth_tracker, settings.growth_interval - 1)  # At the interval or beyond, torch's kernel would never grow it.
        return replace(self, scale=scale, growth_tracker=tracker, tolerance=min(self.tolerance, settings.hysteresis))

    @staticmethod
    def warn_unused(saved: Mapping[str, Any]) -> None:
        """Says that a state is of no use to a disabled scaler, if there is one."""
        if saved:
            warnings.warn(
                "A loss scaler's state was loaded into a disabled scaler, which has no use for it: it is set aside.",
                HalfstepWarning,
                stacklevel=3,
            )


def _adopted(saved: Mapping[str, Any], settings: ScalerSettings) -> ScalerSettings:
    names = {field.name for field in fields(ScalerSettings)}
    changes = {name: value for name, value in saved.items() if name in names}
    return replace(settings, **changes)


def _count(name: str, saved: Mapping[str, Any]) -> int:
    value = saved[name]
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidTypeError(f"The scaler's state, entry {name!r}, is a whole number, not {value!r}.")
    if value < 0:
        raise ConfigurationError(f"The scaler's state, entry {name!r}, is {value!r}; allowed are whole numbers from 0.")
    return int(value)
