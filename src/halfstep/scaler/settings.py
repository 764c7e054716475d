"""How a loss scale may move: the settings of a `LossScaler`, checked."""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Final, final

import torch

from halfstep.errors import ConfigurationError, InvalidTypeError

__all__ = ["ScalerSettings", "check_device", "check_scale"]

_LARGEST: Final = 3.4028234663852886e38  # float32, in which a scale is held
_SMALLEST: Final = 2.0**-126
_LONGEST: Final = 2**31 - 1  # int32, in which the growth tracker is held


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """How a loss scale may move.

    Attributes:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after `growth_interval` updates in a row without a skip; above 1.
        backoff_factor: What it is multiplied by after a skip; between 0 and 1.
        growth_interval: Updates in a row without a skip after which it grows.
        min_scale: The scale never falls below it; 0 for no floor.
        max_scale: The scale never rises above it; `None` for no ceiling.
        hysteresis: Skips that are tolerated before the scale backs off. Once used up, they are granted again when the scale grows, or would
            have grown but for its ceiling.
        static: The scale never moves.
        max_consecutive_skips: Updates in a row with a skip at which a `PersistentSkipsError` is raised; `None` for never.

    Raises:
        InvalidTypeError: A setting is of the wrong type.
        ConfigurationError: A setting has a value that is not allowed, or that does not go with another.

    Example:
        >>> ScalerSettings(init_scale=1024.0, min_scale=2048.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: LossScaler(init_scale=1024.0, min_scale=2048.0): the first scale lies below the floor. Lower
        min_scale, or raise init_scale.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float | None = None
    hysteresis: int = 0
    static: bool = False
    max_consecutive_skips: int | None = None

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.max_scale is not None:
            object.__setattr__(self, "max_scale", _number("max_scale", self.max_scale))
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.max_consecutive_skips is not None:
            object.__setattr__(self, "max_consecutive_skips", _whole("max_consecutive_skips", self.max_consecutive_skips))
        if not isinstance(self.static, bool):
            raise InvalidTypeError(f"LossScaler(static=...) takes True or False, not {self.static!r}.")
        check_scale(self.init_scale, named="LossScaler(init_scale=...)")
        self._check_factors()
        self._check_counts()
        self._check_bounds()

    def _check_factors(self) -> None:
        if not 1 < self.growth_factor <= _LARGEST:
            raise ConfigurationError(
                f"LossScaler(growth_factor={self.growth_factor!r}): allowed is a finite number above 1. For a scale that stays as it is, "
                "use static=True."
            )
        if not 0 < self.backoff_factor < 1:
            raise ConfigurationError(
                f"LossScaler(backoff_factor={self.backoff_factor!r}): allowed is a number between 0 and 1, both excluded. For a scale that "
                "stays as it is, use static=True."
            )

    def _check_counts(self) -> None:
        for name, lowest in (("growth_interval", 1), ("hysteresis", 0), ("max_consecutive_skips", 1)):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= _LONGEST:
                raise ConfigurationError(f"LossScaler({name}={value!r}): allowed is a whole number from {lowest} to {_LONGEST}.")

    def _check_bounds(self) -> None:
        if not (self.min_scale >= 0 and math.isfinite(self.min_scale)):
            raise ConfigurationError(f"LossScaler(min_scale={self.min_scale!r}): allowed is a finite number from 0; 0 means no floor.")
        if self.max_scale is not None and not self.max_scale > 0:
            raise ConfigurationError(f"LossScaler(max_scale={self.max_scale!r}): allowed is a number above 0; None means no ceiling.")
        if self.init_scale < self.min_scale:
            raise ConfigurationError(
                f"LossScaler(init_scale={self.init_scale!r}, min_scale={self.min_scale!r}): the first scale lies below the floor. Lower "
                "min_scale, or raise init_scale."
            )
        if self.max_scale is not None and self.init_scale > self.max_scale:
            raise ConfigurationError(
                f"LossScaler(init_scale={self.init_scale!r}, max_scale={self.max_scale!r}): the first scale lies above the ceiling. Raise "
                "max_scale, or lower init_scale."
            )

    @property
    def may_fall_below_one(self) -> bool:
        """Whether a gradient can become infinite by being divided by a scale that these settings allow."""
        return self.init_scale < 1 if self.static else self.min_scale < 1

    @property
    def floor(self) -> float:
        """`min_scale` in float32, in which a scale is compared with it: there 0.7 is less than 0.7."""
        return c_float(self.min_scale).value

    @property
    def ceiling(self) -> float:
        """`max_scale` in float32; infinity for none."""
        return math.inf if self.max_scale is None else c_float(self.max_scale).value

    def clamped(self, scale: float) -> float:
        """The scale itself, or the bound that it lies beyond."""
        return min(max(scale, self.floor), self.ceiling)

    def as_dict(self) -> dict[str, float | int | bool | None]:
        """Every setting by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def check_scale(value: object, *, named: str) -> float:
    """Accepts a number that can be a loss scale: finite and above 0 in float32, with a reciprocal that is finite, too.

    Args:
        value: The number.
        named: The call that it was passed to, for the message.

    Returns:
        It, in float32.

    Raises:
        InvalidTypeError: It is no number.
        ConfigurationError: It is out of this range.

    Example:
        >>> check_scale(2, named="update(...)")
        2.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{named} takes a number, not {value!r}.")
    scale = float(value)
    if not _SMALLEST <= scale <= _LARGEST:  # NaN fails this, too.
        raise ConfigurationError(f"{named}: {scale!r} cannot be a loss scale. Allowed are finite numbers above 0, such as 65536.0.")
    return c_float(scale).value


def check_device(device: str | None) -> str | None:
    """Accepts the type of a device that losses are scaled on, or `None`.

    Raises:
        InvalidTypeError: It is no text.
        ConfigurationError: It is no such device, or there is none of this type here.

    Example:
        >>> check_device("cpu")
        'cpu'
    """
    if device is None:
        return None
    if not isinstance(device, str):
        raise InvalidTypeError(f"LossScaler(device) takes the name of a device type, such as 'cuda', or None, not {device!r}.")
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"LossScaler({device!r}): allowed are 'cpu', 'cuda', and None for the device of what is scaled first.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"LossScaler('cuda'): this torch ({torch.__version__}) sees no CUDA device. Leave the device out, or pass 'cpu'."
        )
    return device


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"LossScaler({name}=...) takes a number, not {value!r}.")
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidTypeError(f"LossScaler({name}=...) takes a whole number, not {value!r}.")
    return int(value)
