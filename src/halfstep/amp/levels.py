"""What Apex's levels stand for, and what of it a script may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, final

import torch

from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy import Policy
from halfstep.precision import DTYPES
from halfstep.scaler import LossScaler
from halfstep.scaler.settings import check_scale

__all__ = ["LEVELS", "Properties"]

LossScale: TypeAlias = float | Literal["dynamic"]

_FIRST_SCALE: Final = 2.0**16
_FLAGS: Final = MappingProxyType[object, bool]({True: True, False: False, "True": True, "False": False})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """What governs a mixed-precision training of Apex. The names are Apex's.

    Attributes:
        opt_level: `O0` to `O3`.
        cast_model_type: What the model computes in, if all of it does; `None` where it does not. At O1, what autocast lowers to.
        patch_torch_functions: Whether operations are cast one by one, by autocast.
        keep_batchnorm_fp32: Whether norms are computed in fp32.
        master_weights: Whether parameters are kept in fp32 where the model computes in half.
        loss_scale: A number, or `dynamic`.
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale

    @classmethod
    def of(cls, opt_level: object, changes: Mapping[str, Any]) -> Properties:
        """Those of a level with changes, of which `None` is none.

        Raises:
            InvalidTypeError: A value is of the wrong type.
            ConfigurationError: There is no such level, a value is not allowed, or it does not go with the level.

        Example:
            >>> Properties.of("O2", {"loss_scale": "128.0", "master_weights": None}).loss_scale
            128.0
        """
        if not isinstance(opt_level, str) or opt_level not in LEVELS:
            raise ConfigurationError(
                f"amp.initialize(opt_level={opt_level!r}): allowed are 'O0', 'O1', 'O2' and 'O3', with the letter O, not a zero."
            )
        given: dict[str, Any] = {name: _checked(name, value) for name, value in changes.items() if value is not None}
        if opt_level == "O1":
            _check_o1(given)
        elif given.get("patch_torch_functions"):
            raise ConfigurationError(
                f"amp.initialize(opt_level={opt_level!r}, patch_torch_functions=True): only O1 casts operations one by one. Use "
                "opt_level='O1', or leave patch_torch_functions out."
            )
        if given.get("cast_model_type") is False:
            given["cast_model_type"] = None
        return replace(LEVELS[opt_level], **given)

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that is computed in; `None` where all is fp32."""
        if self.patch_torch_functions:
            return torch.bfloat16 if self.cast_model_type is torch.bfloat16 else torch.float16
        return None if self.cast_model_type is torch.float32 else self.cast_model_type

    @property
    def stores_half(self) -> bool:
        """Whether parameters themselves are stored in half, without copies in fp32."""
        return self.half is not None and not self.patch_torch_functions and not self.master_weights

    def policy(self) -> Policy | None:
        """The policy that says the same; `None` where nothing is cast.

        Example:
            >>> str(LEVELS["O3"].policy())
            'pure fp16'
        """
        if self.half is None:
            return Policy.O0 if self.cast_model_type is torch.float32 else None
        precision = next(name for name, dtype in DTYPES.items() if dtype is self.half)
        if self.patch_torch_functions:
            return replace(Policy.O1, default=precision)
        return replace(Policy.O2 if self.keep_batchnorm_fp32 else Policy.O3, default=precision)

    def scaler(self, *, min_loss_scale: float | None, max_loss_scale: float) -> LossScaler:
        """A scaler for one loss.

        Args:
            min_loss_scale: The floor of a dynamic scale; `None` for 1, below which a scale would make gradients larger.
            max_loss_scale: Its ceiling.

        Raises:
            InvalidTypeError: A bound is no number.
            ConfigurationError: The floor lies above the ceiling, or a bound cannot be a scale.
        """
        if self.loss_scale != "dynamic":
            return LossScaler(init_scale=self.loss_scale, min_scale=min(1.0, self.loss_scale), static=True)
        ceiling = check_scale(max_loss_scale, named="amp.initialize(max_loss_scale=...)")
        floor = min(1.0, ceiling)
        if min_loss_scale is not None:
            floor = check_scale(min_loss_scale, named="amp.initialize(min_loss_scale=...)")
        if floor > ceiling:
            raise ConfigurationError(
                f"amp.initialize(min_loss_scale={min_loss_scale!r}, max_loss_scale={max_loss_scale!r}): the floor lies above the ceiling. "
                "Lower min_loss_scale, or raise max_loss_scale."
            )
        first = min(max(_FIRST_SCALE, floor), ceiling)
        return LossScaler(init_scale=first, min_scale=floor, max_scale=ceiling)


LEVELS: Final = MappingProxyType(
    {
        "O0": Properties(
            opt_level="O0",
            cast_model_type=torch.float32,
            patch_torch_functions=False,
            keep_batchnorm_fp32=None,
            master_weights=False,
            loss_scale=1.0,
        ),
        "O1": Properties(
            opt_level="O1",
            cast_model_type=None,
            patch_torch_functions=True,
            keep_batchnorm_fp32=None,
            master_weights=None,
            loss_scale="dynamic",
        ),
        "O2": Properties(
            opt_level="O2",
            cast_model_type=torch.float16,
            patch_torch_functions=False,
            keep_batchnorm_fp32=True,
            master_weights=True,
            loss_scale="dynamic",
        ),
        "O3": Properties(
            opt_level="O3",
            cast_model_type=torch.float16,
            patch_torch_functions=False,
            keep_batchnorm_fp32=False,
            master_weights=False,
            loss_scale=1.0,
        ),
    }
)


def _checked(name: str, value: object) -> object:
    if name == "loss_scale":
        return _loss_scale(value)
    if name == "cast_model_type":
        if value is not False and value not in DTYPES.values():
            raise ConfigurationError(
                f"amp.initialize(cast_model_type={value!r}): allowed are torch.float16, torch.bfloat16, torch.float32 and None for what "
                "the level stands for."
            )
        return value
    # Apex's examples pass what argparse gives them, which is text.
    strings = name == "keep_batchnorm_fp32"
    if not isinstance(value, bool) and not (strings and isinstance(value, str) and value in _FLAGS):
        allowed = "True, False, 'True', 'False'" if strings else "True, False"
        raise InvalidTypeError(f"amp.initialize({name}={value!r}): allowed are {allowed} and None for what the level stands for.")
    return _FLAGS[value]


def _loss_scale(value: object) -> LossScale:
    if value == "dynamic":
        return "dynamic"
    number: Any = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError as error:
            raise ConfigurationError(
                f"amp.initialize(loss_scale={value!r}): allowed are 'dynamic' and a number above 0, as a number or as text."
            ) from error
    return check_scale(number, named="amp.initialize(loss_scale=...)")


def _check_o1(given: Mapping[str, object]) -> None:
    """Accepts changes that go with O1, where the parameters stay in fp32 and autocast chooses what is computed in half."""
    if given.get("cast_model_type") is torch.float16:
        raise ConfigurationError(
            "amp.initialize(opt_level='O1', cast_model_type=torch.float16): O1 casts operations, and the model's parameters stay in fp32. "
            "Leave cast_model_type out, or use opt_level='O2' or 'O3', which compute all of the model in half."
        )
    reasons = {
        "keep_batchnorm_fp32": "O1 leaves norms to autocast, and their parameters are fp32 anyway",
        "master_weights": "with O1 the model's parameters are fp32, so they need no copies in fp32",
    }
    for name, reason in reasons.items():
        if name in given:
            raise ConfigurationError(f"amp.initialize(opt_level='O1', {name}={given[name]!r}): {reason}. Leave {name} out, or use 'O2'.")
