"""The gradient norm contains the loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts
from halfstep.monitor.rules.wording import amount, prefix
from halfstep.records import Alert, StepRecord

__all__ = ["ScaledNormLogged"]

_INFINITY: Final = math.inf

# In powers of two: how near to the scale's own movement that of the norm is.
_NEAR: Final = 0.3

# A movement that is not so many times as large as the noise of two medians is not told from noise.
_CLEAR: Final = 5.0


class _Change(NamedTuple):
    before: tuple[float, ...]  # norms before the scale changed; none where nothing is compared
    scale: float  # before
    verdicts: tuple[bool, ...]  # whether the norm moved along with the scale, each of the last changes
    told: bool
    step: int  # in which the scale changed last
    optimizer: str


# The scale, the norms at this scale, and its last change. A plain tuple is made in a third of a named one's time.
_State: TypeAlias = tuple[float, tuple[float, ...], _Change]

_START: Final[_State] = (math.nan, (), _Change(before=(), scale=math.nan, verdicts=(), told=False, step=0, optimizer=""))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledNormLogged(AbstractRule):
    """The gradient norm moves with the loss scale: it was taken before gradients were unscaled.

    Medians of the norms just before and just after a change of the scale are compared, where norms are steady enough for that.

    Attributes:
        changes: Of the last three changes of the scale, the norm has to move along with so many.
        norms: So many norms on either side of a change are compared.
        least_norms: So many are enough where the scale changes again before that.

    Example:
        >>> ScaledNormLogged(changes=4)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: ScaledNormLogged(changes=4): allowed is a whole number from 1 to 3.
    """

    name: ClassVar[str] = "scaled_norm_logged"

    changes: int = 2
    norms: int = 20
    least_norms: int = 3

    def __post_init__(self) -> None:
        check_counts(self, changes=1, norms=1, least_norms=1)
        if self.changes > 3:
            raise ConfigurationError(f"ScaledNormLogged(changes={self.changes!r}): allowed is a whole number from 1 to 3.")
        if self.least_norms > self.norms:
            raise ConfigurationError(
                f"ScaledNormLogged(norms={self.norms!r}, least_norms={self.least_norms!r}): the least number of norms is larger than the "
                "largest. Lower least_norms, or raise norms."
            )

    def start(self) -> _State:
        """The state before the first step."""
        return _START

    def judge(self, state: _State, record: StepRecord) -> tuple[_State, Alert | None]:
        """Collects norms, and compares them when the scale has changed and there are enough of them."""
        scale, norms, change = state
        norm = record.grad_norm
        known = norm is not None and not record.skipped and 0 < norm < _INFINITY
        if record.scale != scale:
            return self._changed(state, record, is_known=known)
        if not known or norm is None:
            return state, None
        norms += (norm,)
        if len(norms) < self.norms:
            return (scale, norms, change), None
        if len(norms) == self.norms and change.before:
            change, alert = self._judged(change, scale, norms)
            return (scale, norms, change._replace(before=())), alert
        return (scale, norms if len(norms) < 2 * self.norms else norms[-self.norms :], change), None

    def end(self, state: _State) -> Alert | None:
        """Judges the last change of the scale, as far as there are norms."""
        scale, norms, change = state
        return self._judged(change, scale, norms)[1]

    def _changed(self, state: _State, record: StepRecord, *, is_known: bool) -> tuple[_State, Alert | None]:
        before, old, change = state
        scale = record.scale
        if not 0 < scale < math.inf:
            return state, None
        norms = (record.grad_norm,) if is_known and record.grad_norm is not None else ()
        if len(old) >= self.least_norms:
            change, alert = self._judged(change, before, old)
            change = change._replace(before=old[-self.norms :], scale=before, step=record.step, optimizer=record.optimizer)
            return (scale, norms, change), alert
        if scale == change.scale:  # It grew, the next step was skipped, and it is back.
            return (scale, change.before + norms, change._replace(before=())), None
        return (scale, norms, change._replace(step=record.step, optimizer=record.optimizer)), None

    def _judged(self, change: _Change, scale: float, norms: tuple[float, ...]) -> tuple[_Change, Alert | None]:
        if not change.before or len(norms) < self.least_norms:
            return change, None
        moves = _moves_along(change.before, norms, math.log2(scale) - math.log2(change.scale))
        if moves is None:
            return change, None
        verdicts = (*change.verdicts, moves)[-3:]
        told = sum(verdicts) >= self.changes or (change.told and any(verdicts))
        after = change._replace(verdicts=verdicts, told=told)
        return after, self._alert(after, scale, norms) if told and not change.told else None

    def _alert(self, change: _Change, scale: float, norms: tuple[float, ...]) -> Alert:
        before, after = _median(change.before), _median(norms)
        times = amount(scale / change.scale)
        return self.alert(
            change.step,
            message=f"{prefix(change.optimizer)}The gradient norm moves with the loss scale: when that went from {amount(change.scale)} to "
            f"{amount(scale)}, times {times}, the norm went from {amount(before)} to {amount(after)}, and it did so in "
            f"{sum(change.verdicts)} of the last {len(change.verdicts)} changes. It is taken while gradients are still multiplied by the "
            f"scale; without it, it is about {amount(after / scale)}. Clipped so, gradients have another limit after each change.",
            advice="Call scaler.unscale_(optimizer) after backward() and before the norm is taken or gradients are clipped "
            "(torch.nn.utils.clip_grad_norm_); log the scale beside it. halfstep.MixedPrecision does both in this order.",
        )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _moves_along(before: tuple[float, ...], after: tuple[float, ...], movement: float) -> bool | None:
    """Whether norms moved by so many powers of two; `None` where they are too unsteady to tell."""
    old, new = (sorted(map(math.log2, norms)) for norms in (before, after))
    noise = max(_spread(old), _spread(new)) / math.sqrt(min(len(old), len(new)))
    if abs(movement) <= _CLEAR * noise:
        return None
    return abs(_median(new) - _median(old) - movement) <= min(_NEAR, abs(movement) / 3)


def _spread(ordered: Sequence[float]) -> float:
    """The width of the middle three fifths; of all, where there are few."""
    margin = len(ordered) // 5
    return ordered[-1 - margin] - ordered[margin]
