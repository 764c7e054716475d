"""The loss is infinite or NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, Severity, StepRecord

__all__ = ["NonfiniteLoss"]


class _State(NamedTuple):
    known: bool  # whether a finite loss was seen, so that a NaN is one, and not a loss that nobody knows
    skips: int  # in a row whose loss is not finite
    told: bool
    fine: int  # finite losses in a row since


_START: Final = _State(known=False, skips=0, told=False, fine=0)
_FINE: Final = _State(known=True, skips=0, told=False, fine=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteLoss(AbstractRule):
    """The loss is infinite or NaN, and the step was taken nevertheless, or step after step is skipped for it.

    A NaN counts where the loss is known: where one was finite before, or where the gradient norm of a step that was taken is not finite
    either.

    Attributes:
        skips: So many skipped steps in a row with such a loss are too many. A step that was taken with one is at once.
        recovery: After so many finite losses in a row it is told again.

    Example:
        >>> NonfiniteLoss(skips=0)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: NonfiniteLoss(skips=0): allowed is a whole number from 1.
    """

    name: ClassVar[str] = "nonfinite_loss"
    severity: ClassVar[Severity] = "error"

    skips: int = 3
    recovery: int = 10

    def __post_init__(self) -> None:
        check_counts(self, skips=1, recovery=1)

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Looks for losses that are not finite."""
        if math.isfinite(record.loss):
            if not state.told or state.fine + 1 >= self.recovery:
                return _FINE, None
            return _State(known=True, skips=0, told=True, fine=state.fine + 1), None
        if math.isnan(record.loss) and not _is_known(state, record):
            return state, None
        skips = state.skips + 1 if record.skipped else 0
        told = state.told or not record.skipped or skips >= self.skips
        after = _State(state.known, skips, told, fine=0)
        return after, self._alert(after, record) if told and not state.told else None

    def _alert(self, state: _State, record: StepRecord) -> Alert:
        loss = amount(record.loss)
        norm = "" if record.grad_norm is None else f" (gradient norm {amount(record.grad_norm)})"
        if record.skipped:
            return self.alert(
                record.step,
                message=f"{prefix(record.optimizer)}The loss is {loss} and was not finite in {state.skips} skipped steps in a row: a loss "
                "scaler skips such a step, but no loss scale makes the loss itself finite.",
                advice="Find the operation that overflows in the forward pass with `halfstep diagnose`, and run it in fp32; check the "
                "batches and the parameters for NaN.",
            )
        if math.isnan(record.loss) and not state.known and record.grad_norm is not None:
            seen = f"The gradient norm is {amount(record.grad_norm)}, the loss is not known to be finite"
        else:
            seen = f"The loss is {loss}{norm}"
        return self.alert(
            record.step,
            message=f"{prefix(record.optimizer)}{seen}, and the step was taken all the same: gradients of such a loss "
            "are usually NaN, and weights that took one stay NaN.",
            advice="Go back to a checkpoint from before this step. Check the batch and the weights for NaN, lower the learning rate, and "
            "find the operation with `halfstep diagnose` or torch.autograd.set_detect_anomaly(True).",
        )


def _is_known(state: _State, record: StepRecord) -> bool:
    """Whether a NaN is what the loss is, and not what stands for a loss that nobody knows."""
    norm = record.grad_norm
    if norm is None or (record.skipped and not math.isfinite(norm)):  # Gradients overflow under finite losses, too.
        return state.known
    return not math.isfinite(norm)
