"""More steps are skipped than a loss scale that settles explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

from halfstep.errors import ConfigurationError
from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.thresholds import check_counts
from halfstep.monitor.rules.wording import amount, counted, prefix, share_text
from halfstep.records import Alert, StepRecord

__all__ = ["SkipRate"]

# What is proposed for runs that are short beside torch's default of 2000: a scale that fell too far rises again in time.
_GROWTH_INTERVAL = 200


class _Scale(NamedTuple):
    last: float  # the scale of the last step
    grown: bool  # whether it has grown, and no skip has followed: the next one says no more than that it grew too far

    def explains(self, record: StepRecord) -> bool:
        """Whether a skip is what comes of a scale that grew."""
        return self.grown or record.scale > self.last

    def after(self, record: StepRecord) -> _Scale:
        """The same, one step later."""
        scale = record.scale
        if scale == self.last and not record.skipped:
            return self
        if record.skipped or scale < self.last:
            return _Scale(scale, grown=False)
        return _Scale(scale, self.grown or scale > self.last)


class _Beginning(NamedTuple):
    seen: int
    skips: int
    settled: float  # the scale of the first step that was taken after the last skip
    was_skipped: bool
    scale: _Scale
    step: int
    optimizer: str


class _Going(NamedTuple):
    seen: int  # since the start; no longer counted once the window is full and none was skipped in it
    skips: tuple[int, ...]  # which of the steps were skipped, as far as they are in the window
    told: bool
    scale: _Scale


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRate(AbstractRule):
    """More steps are skipped than a loss scale that settles explains.

    A few skips at the start, and one each time that the scale has grown, are how a loss scale is found; they are not counted.

    Attributes:
        start_steps: So many steps are the start of a run.
        start_skips: So many skips among them are too many.
        window: So many steps are looked back on afterwards.
        window_skips: So many skips among them are too many.

    Example:
        >>> SkipRate(window=10, window_skips=11)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: SkipRate(window=10, window_skips=11): there are fewer steps than skips. Lower window_skips, or
        raise window.
    """

    name: ClassVar[str] = "skip_rate"

    start_steps: int = 30
    start_skips: int = 7
    window: int = 200
    window_skips: int = 10

    def __post_init__(self) -> None:
        check_counts(self, start_steps=1, start_skips=1, window=1, window_skips=1)
        for steps, skips in (("start_steps", "start_skips"), ("window", "window_skips")):
            if getattr(self, skips) > getattr(self, steps):
                raise ConfigurationError(
                    f"SkipRate({steps}={getattr(self, steps)!r}, {skips}={getattr(self, skips)!r}): there are fewer steps than skips. "
                    f"Lower {skips}, or raise {steps}."
                )

    def start(self) -> _Beginning | _Going:
        """The state before the first step."""
        nothing = _Scale(math.nan, grown=False)
        return _Beginning(seen=0, skips=0, settled=math.nan, was_skipped=False, scale=nothing, step=0, optimizer="")

    def judge(self, state: _Beginning | _Going, record: StepRecord) -> tuple[_Beginning | _Going, Alert | None]:
        """Counts skips, and judges them when a step is taken again: a run of skips that does not end is `persistent_skips`."""
        if isinstance(state, _Beginning):
            return self._begin(state, record)
        if not record.skipped and not state.skips and record.scale == state.scale.last and state.seen >= self.window:
            return state, None
        return self._go_on(state, record)

    def end(self, state: _Beginning | _Going) -> Alert | None:
        """Judges a run that ended before its start was over."""
        return self._beginning_alert(state) if isinstance(state, _Beginning) else None

    def _begin(self, state: _Beginning, record: StepRecord) -> tuple[_Beginning | _Going, Alert | None]:
        scale = state.scale.after(record)
        counts = record.skipped and not state.scale.explains(record)
        settled = record.scale if state.was_skipped and not record.skipped else state.settled
        was_skipped = counts or (state.was_skipped and record.skipped)
        after = _Beginning(state.seen + 1, state.skips + counts, settled, was_skipped, scale, record.step, record.optimizer)
        if after.seen < self.start_steps or record.skipped:
            return after, None
        return _Going(seen=0, skips=(), told=False, scale=scale), self._beginning_alert(after)

    def _beginning_alert(self, state: _Beginning) -> Alert | None:
        if state.skips < self.start_skips:
            return None
        started = math.isfinite(state.settled)
        scale = state.settled if started else state.scale.last / 2
        found = f"Steps began to be taken at a scale of {amount(scale)}." if started else f"None was taken down to {amount(2 * scale)}."
        return self.alert(
            state.step,
            message=f"{prefix(state.optimizer)}{state.skips} of the first {counted(state.seen, 'step')} were skipped "
            f"({share_text(state.skips, state.seen)}): the loss scale began too high, and their batches taught nothing. {found}",
            advice=f"Begin there: torch.amp.GradScaler(init_scale={amount(scale)}, growth_interval={_GROWTH_INTERVAL}); with so short an "
            "interval, a scale that fell too far rises again. In a run that was resumed, load the scaler's state_dict().",
        )

    def _go_on(self, state: _Going, record: StepRecord) -> tuple[_Going, Alert | None]:
        seen, skips, scale = state.seen + 1, state.skips, state.scale.after(record)
        if skips and skips[0] <= seen - self.window:
            skips = skips[1:]
        if record.skipped:
            if not state.scale.explains(record):
                skips = (*skips, seen)
            return _Going(seen, skips, state.told, scale), None
        if len(skips) < self.window_skips:
            return _Going(seen, skips, state.told and 2 * len(skips) >= self.window_skips, scale), None
        return _Going(seen, skips, told=True, scale=scale), None if state.told else self._window_alert(record, len(skips), seen)

    def _window_alert(self, record: StepRecord, skips: int, seen: int) -> Alert:
        steps = min(seen, self.window)
        return self.alert(
            record.step,
            message=f"{prefix(record.optimizer)}{skips} of the last {counted(steps, 'step')} were skipped ({share_text(skips, steps)}), "
            "not counting those that a scale which had grown explains: their batches taught nothing, and the scale, "
            f"{amount(record.scale)} now, does not settle.",
            advice="Look for what overflows in some steps and not in others: `halfstep diagnose` replays one that fails and names the "
            "operation. Batches with outliers, too high a learning rate, and a term of the loss that is divided by something small are "
            "frequent causes.",
        )
