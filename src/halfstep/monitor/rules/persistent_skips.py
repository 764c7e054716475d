"""Step after step is skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts, check_numbers
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, Severity, StepRecord

__all__ = ["PersistentSkips"]


class _State(NamedTuple):
    row: int  # skips in a row
    scale: float  # of the first of them
    taken: bool  # whether a step was taken before
    known: bool  # whether a finite loss was seen, so that a NaN is one, and not a loss that nobody knows


_START: Final = _State(row=0, scale=math.nan, taken=False, known=False)
_TAKEN: Final = _State(row=0, scale=math.nan, taken=True, known=False)
_TAKEN_AND_KNOWN: Final = _State(row=0, scale=math.nan, taken=True, known=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentSkips(AbstractRule):
    """Step after step is skipped, so that nothing is learned any more.

    Attributes:
        skips: So many in a row are too many.
        low_scale: At this scale and below, a fault that no loss scale cures is likelier than a scale that is too high.

    Example:
        >>> PersistentSkips(skips=0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: PersistentSkips(skips=0): allowed is a whole number from 1.
    """

    name: ClassVar[str] = "persistent_skips"
    severity: ClassVar[Severity] = "error"

    skips: int = 10
    low_scale: float = 128.0

    def __post_init__(self) -> None:
        check_counts(self, skips=1)
        check_numbers(self, low_scale=0)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Counts skips in a row; a step that is taken ends them."""
        if state is _TAKEN_AND_KNOWN and not record.skipped:
            return state, None
        known = state.known or math.isfinite(record.loss)
        if not record.skipped:
            return _TAKEN_AND_KNOWN if known else _TAKEN, None
        row = state.row + 1
        after = _State(row, state.scale if state.row else record.scale, state.taken, known)
        return after, self._alert(after, record) if row == self.skips else None

    def _alert(self, state: _State, record: StepRecord) -> Alert:
        scale = record.scale
        seen = (
            f"{prefix(record.optimizer)}{state.row} steps in a row were skipped, since their gradients were not finite: nothing is learned "
            f"any more. {_movement(state.scale, scale)}"
        )
        if math.isinf(record.loss) or (math.isnan(record.loss) and state.known):
            return self.alert(
                record.step,
                message=f"{seen} The loss itself is {amount(record.loss)}, and no loss scale changes that.",
                advice="Look for the operation that overflows in the forward pass: `halfstep diagnose` names it, and what mends it. Check "
                "the batch and the parameters for NaN.",
            )
        if not state.taken and math.isfinite(record.loss) and scale > 2:
            return self.alert(
                record.step,
                message=f"{seen} None was taken before, and the loss is finite ({amount(record.loss)}): the scale probably began too high.",
                advice=f"Begin lower: torch.amp.GradScaler(init_scale={amount(scale / 2)}), or take the mean of the loss instead of its "
                "sum. If steps are skipped at a scale of 1, too, `halfstep diagnose` finds the operation.",
            )
        if scale <= self.low_scale:
            seen = f"{seen} At so low a scale, a fault that no loss scale cures is likely."
        return self.alert(
            record.step,
            message=seen,
            advice="Run `halfstep diagnose`: it finds the operation whose result is not finite, and what mends it. Until then, a lower "
            "learning rate, or bf16 in place of fp16, may keep the run alive.",
        )


def _movement(before: float, now: float) -> str:
    if before > now:
        return f"The loss scale fell from {amount(before)} to {amount(now)} in them."
    return f"The loss scale is {amount(now)}."
