"""Gradients are zero, or next to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, StepRecord

__all__ = ["VanishingGradients"]


class _State(NamedTuple):
    early: tuple[float, ...]  # the first norms, until there are enough
    median: float  # of them; NaN until then
    limit: float  # at which a gradient norm is as good as zero
    row: int  # steps in a row at or below it
    largest: float  # norm among them


_START: Final = _State(early=(), median=math.nan, limit=0.0, row=0, largest=0.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradients(AbstractRule):
    """The gradients are zero, or next to it, in step after step that is taken.

    Attributes:
        ratio: A gradient norm at or below this share of the early median is as good as zero.
        early: So many norms above zero, the first ones, make up that median.
        steps: So many steps in a row are too many.

    Example:
        >>> VanishingGradients(ratio=-1.0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: VanishingGradients(ratio=-1.0): allowed is a finite number above 0.
    """

    name: ClassVar[str] = "vanishing_gradients"

    ratio: float = 1e-7
    early: int = 20
    steps: int = 20

    def __post_init__(self) -> None:
        check_numbers(self, ratio=0)
        check_counts(self, early=1, steps=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts steps whose gradient norm is known and as good as zero."""
        norm = record.grad_norm
        if norm is not None and norm > state.limit > 0 and not state.row:
            return state, None
        if norm is None or record.skipped or not norm >= 0:  # NaN is not known.
            return state, None
        if norm <= state.limit:
            after = _State(state.early, state.median, state.limit, state.row + 1, max(state.largest, norm))
            return after, self._alert(after, record) if after.row == self.steps else None
        if math.isnan(state.median) and norm < math.inf:
            return self._learned((*state.early, norm)), None
        return _State(state.early, state.median, state.limit, 0, 0.0) if state.row else state, None

    def _learned(self, early: tuple[float, ...]) -> _State:
        if len(early) < self.early:
            return _State(early, math.nan, 0.0, 0, 0.0)
        median = sorted(early)[len(early) // 2]
        return _State((), median, self.ratio * median, 0, 0.0)

    def _alert(self, state: _State, record: StepRecord) -> Alert:
        early = "" if math.isnan(state.median) else f", where the median of the first {self.early} was {amount(state.median)}"
        what = f"at most {amount(state.largest)}" if state.largest else "0"
        advice = (
            "Check that the loss depends on the parameters: no detach(), no torch.no_grad(), requires_grad=True, and an activation that is "
            "not saturated or dead. A loss that is at its minimum has no gradient either."
        )
        if record.precision == "fp16":
            advice = (
                f"In fp16, gradients underflow where the loss scale ({amount(record.scale)}) is too low: `halfstep audit` shows where. Use "
                f"torch.amp.GradScaler, or train in bf16. {advice}"
            )
        return self.alert(
            record.step,
            message=f"{prefix(record.optimizer)}The gradient norm was {what} in {state.row} steps in a row that were taken{early}: nothing "
            "is learned any more.",
            advice=advice,
        )
