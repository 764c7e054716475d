"""A loss is scaled for bf16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts
from halfstep.monitor.rules.wording import amount, counted
from halfstep.records import Alert, StepRecord

__all__ = ["ScalerWithBf16"]


class _State(NamedTuple):
    row: int  # steps in a row in bf16 with a scaler
    skips: int  # among them


_START: Final = _State(row=0, skips=0)

# A run that scaled fp16 and goes on in bf16, as one that falls back does, keeps its scaler for a reason.
_WAS_FP16: Final = _State(row=-1, skips=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerWithBf16(AbstractRule):
    """A loss is scaled for bf16, which has the range of fp32 and needs no scaling. A run that was in fp16 before is left alone.

    Attributes:
        steps: So many steps in a row are told.

    Example:
        >>> ScalerWithBf16(steps=1.5)
        Traceback (most recent call last):
        ...
        halfstep.errors.InvalidTypeError: ScalerWithBf16(steps=...) takes a whole number, not 1.5.
    """

    name: ClassVar[str] = "scaler_with_bf16"
    is_located: ClassVar[bool] = True

    steps: int = 3

    def __post_init__(self) -> None:
        check_counts(self, steps=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts steps in bf16 whose loss is scaled."""
        if state is _WAS_FP16 or (record.precision == "fp16" and _is_scaled(record)):
            return _WAS_FP16, None
        if record.precision != "bf16" or not _is_scaled(record):
            return _START, None
        after = _State(state.row + 1, state.skips + record.skipped)
        return after, self._alert(after, record) if after.row == self.steps else None

    def _alert(self, state: _State, record: StepRecord) -> Alert:
        skips = f" {counted(state.skips, 'step')} of them {'was' if state.skips == 1 else 'were'} skipped." if state.skips else ""
        return self.alert(
            record.step,
            message=f"{counted(state.row, 'step')} in a row ran in bf16 with a loss scaler (scale {amount(record.scale)}).{skips} bf16 "
            "has the range of fp32, so there is nothing to rescue: the scale grows up to 1.7e38, each step passes over its gradients once "
            "more, and may be skipped because of the scale alone.",
            advice='Switch it off: torch.amp.GradScaler("cuda", enabled=dtype == torch.float16).',
        )


def _is_scaled(record: StepRecord) -> bool:
    if record.scaler is None:
        return record.scale != 1.0 and math.isfinite(record.scale)
    return record.scaler == "used"
