"""The loss jumps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, StepRecord

__all__ = ["LossSpike"]

_LEAST: Final = -math.inf
_INFINITY: Final = math.inf

# Limits are computed anew after so many losses. They lag a little, which a loss that climbs in a few steps does not escape.
_EVERY: Final = 25

# The median absolute deviation of normally distributed values, times this, is their standard deviation.
_DEVIATION: Final = 1.4826


class _Limits(NamedTuple):
    row: float  # several losses in a row above it are a spike
    single: float  # one loss above it is a spike
    losses: tuple[float, ...]  # what they are computed from
    median: float
    deviation: float
    early: float  # the magnitude of the first median
    high: int  # losses in a row above the lower limit
    told: int  # 0 after a calm stretch


# The losses since the limits were computed, and these. A plain tuple is made in a third of a named one's time.
_State: TypeAlias = tuple[tuple[float, ...], _Limits]

_NONE: Final = _Limits(math.inf, math.inf, losses=(), median=math.nan, deviation=math.nan, early=math.nan, high=0, told=0)
_START: Final[_State] = ((), _NONE)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(AbstractRule):
    """The loss jumps far above what it was.

    A loss that lies above the median of the last `window` ones by more than `deviations` robust standard deviations (1.4826 times the
    median absolute deviation), by more than `row_factor` times what any of them did, and by more than `share` of the loss that the run
    began with, is high. Several such losses in a row are a spike. A single one is only where it does so by more than `single_factor` times:
    ordinary losses have heavy tails.

    Attributes:
        window: So many finite losses are compared with.
        least: Before so many, nothing is told.
        deviations: How many robust standard deviations a spike lies above the median.
        row: So many high losses in a row are a spike.
        row_factor: How many times as far above the median they lie as the highest loss in the window.
        single_factor: How many times as far one loss lies that is a spike by itself.
        share: The share of the early loss by which a spike exceeds the median. Where a loss comes near to zero, its noise is no spike.

    Example:
        >>> LossSpike(window=20)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: LossSpike(least=30, window=20): there are fewer losses than are needed. Lower least, or raise
        window.
    """

    name: ClassVar[str] = "loss_spike"

    window: int = 100
    least: int = 30
    deviations: float = 10.0
    row: int = 3
    row_factor: float = 2.0
    single_factor: float = 8.0
    share: float = 0.05

    def __post_init__(self) -> None:
        check_counts(self, window=1, least=3, row=1)
        check_numbers(self, deviations=0, row_factor=0, single_factor=0, share=0)
        if self.least > self.window:
            raise ConfigurationError(
                f"LossSpike(least={self.least!r}, window={self.window!r}): there are fewer losses than are needed. Lower least, or raise "
                "window."
            )

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Compares a finite loss with those before it."""
        recent, limits = state
        loss = record.loss
        if not _LEAST < loss < _INFINITY:
            return state, None
        recent += (loss,)
        if loss <= limits.row:
            if len(recent) < _EVERY and limits.losses and not limits.high:
                return (recent, limits), None
            return self._renewed(recent, limits._replace(high=0)), None
        high = limits.high + 1
        is_spike = high >= self.row or loss > limits.single
        alert = self._alert(limits, high, record) if is_spike and not limits.told else None
        return self._renewed(recent, limits._replace(high=high, told=2 if is_spike or limits.told else 0)), alert

    def _renewed(self, recent: tuple[float, ...], limits: _Limits) -> _State:
        """The state with new limits, where it is time."""
        if len(recent) < (_EVERY if limits.losses else self.least):
            return recent, limits
        losses = (limits.losses + recent)[-self.window :]
        ordered = sorted(losses)
        median = ordered[len(ordered) // 2]
        deviation = _DEVIATION * _median_distance(ordered, median)
        early = abs(median) if math.isnan(limits.early) else limits.early
        # Where most losses are the same there is no deviation to speak of; then a spike is a loss that doubles.
        least = max(self.deviations * deviation, self.share * early, 0.0 if deviation else abs(median)) or math.inf
        highest = ordered[-1] - median
        row, single = (median + max(least, factor * highest) for factor in (self.row_factor, self.single_factor))
        return (), _Limits(row, max(row, single), losses, median, deviation, early, limits.high, max(limits.told - 1, 0))

    def _alert(self, limits: _Limits, high: int, record: StepRecord) -> Alert:
        loss = amount(record.loss)
        row = f", and has been high for {high} steps in a row" if high > 1 else ""
        return self.alert(
            record.step,
            message=f"{prefix(record.optimizer)}The loss jumped to {loss}{row}: the median of the {len(limits.losses)} "
            f"before is {amount(limits.median)}, with a robust standard deviation of {amount(limits.deviation)}. A "
            "spike undoes what was learned, and often comes before NaN.",
            advice="Look at the batch and the gradient norm of this step. Clip gradients (scaler.unscale_(optimizer), then "
            "torch.nn.utils.clip_grad_norm_), lower the learning rate or warm it up for longer; with Adam, a smaller beta2 or a larger eps "
            "helps. If the loss does not come down again, go back to a checkpoint from before.",
        )


def _median_distance(ordered: Sequence[float], median: float) -> float:
    """The median of the distances of sorted values from their median: those nearest to it are neighbours, so that no sorting is needed."""
    others = len(ordered) // 2
    first = bisect_left(range(len(ordered) - others), True, key=lambda index: ordered[index + others] - median >= median - ordered[index])
    return min(max(median - ordered[i], ordered[i + others] - median) for i in (max(first - 1, 0), min(first, len(ordered) - others - 1)))
