"""Remedies that are tried: parts of a model in fp32, another loss scale, another precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from halfstep.policy import Override, Policy
from halfstep.records import Experiment, OpRecord, Precision, Remedy
from halfstep.replay.alignment import Pair
from halfstep.replay.deviations import Deviations
from halfstep.replay.faults import Faults
from halfstep.replay.islands import Islands
from halfstep.replay.runs import Replay, Run
from halfstep.replay.verification import Course
from halfstep.replay.wording import island_text, operation_name

__all__ = ["Trial", "Trials"]

# So many islands are tried before another precision is.
_MOST_ISLANDS: Final = 4

# Where the forward pass is mended, a loss scale that is still too high for the backward pass is lowered by this much at once.
_LOWERING: Final = 2.0**-8

# A result that was lost is kept where so little of its error is left.
_MENDED: Final = 0.5
_BETTER: Final = 3.0


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A replay with a remedy.

    Attributes:
        run: The replay.
        fault: The operation that still breaks; `None` where the remedy holds.
    """

    run: Run
    fault: OpRecord | None


@final
class Trials:
    """Tries remedies on a step, each by a replay, and puts those that hold to the proof of further steps.

    Args:
        replay: The step.
        policy: What it ran in when it broke.
        full: The same step in fp32.
        course: How training goes on.
        floor: The lowest loss scale.
        note: Called with each experiment.
    """

    def __init__(
        self, replay: Replay, *, policy: Policy, full: Run, course: Course, floor: float, note: Callable[[Experiment], None]
    ) -> None:
        self._replay = replay
        self._policy = policy
        self._full = full
        self._course = course
        self._floor = floor
        self._note = note

    def islands(self, origin: OpRecord, *, scale: float) -> tuple[Remedy, ...]:
        """The smallest island in fp32 with which nothing breaks, from what broke outwards; none where no island helps."""
        islands = Islands(self._replay.code.model, policy=self._policy)
        overrides = islands.cover_op(origin)
        for _ in range(_MOST_ISLANDS):
            if not overrides:
                return ()
            trial = self._try(_with(self._policy, overrides), scale=scale)
            text = Islands.text(overrides)
            self._note(_told(trial, f"Does {text} mend it?"))
            if trial.fault is None:
                return (self._proven(island_text(overrides), text, trial.run),)
            overrides = islands.cover_op(trial.fault)
        return ()

    def keeps(self, origin: OpRecord, index: int, *, before: Pair) -> tuple[Remedy, ...]:
        """The smallest island in fp32 that keeps the accuracy of an operation, and with it that of the loss and the gradients.

        Args:
            origin: The operation.
            index: Its index.
            before: The step without an island, and in fp32.
        """
        islands = Islands(self._replay.code.model, policy=self._policy)
        overrides = islands.cover_op(origin)
        place, error, harm = before.counterparts[index], before.errors[index] or 0.0, Deviations(before).harm
        for _ in range(_MOST_ISLANDS):
            if not overrides:
                return ()
            run = self._replay.repeated(_with(self._policy, overrides), scale=before.low.scale)
            pair = Pair(low=run, full=self._full)
            now = next((pair.errors[at] or 0.0 for at, other in enumerate(pair.counterparts) if other == place), 0.0)
            left = Deviations(pair).harm
            is_kept = run.is_finite and now < _MENDED * error and (left < 1 or left * _BETTER < harm)
            text = Islands.text(overrides)
            answer = f"Its error there is {now:.2g} in place of {error:.2g}."
            self._note(_experiment(run, f"Does {text} keep its accuracy?", answer, is_clean=is_kept, origin=None))
            if is_kept:
                return (self._proven(island_text(overrides), text, run),)
            overrides = islands.cover_op(origin)
        return ()

    def precision(self, precision: Precision, *, text: str) -> tuple[Remedy, ...]:
        """Another default precision; none where it breaks as well."""
        policy = replace(self._policy, default=precision) if not self._policy.pure else Policy.parse(f"pure {precision}")
        trial = self._try(policy, scale=1.0)
        self._note(_told(trial, f"Does {precision} mend it?"))
        return (self._proven(text, None, trial.run),) if trial.fault is None else ()

    def proven_scale(self, text: str, run: Run) -> Remedy:
        """A loss scale with which a replay was clean."""
        return self._proven(text, None, run)

    def _proven(self, text: str, override: str | None, run: Run) -> Remedy:
        is_clean = self._course.is_clean(self._replay, run)
        count = len(self._course.following)
        answer = "Yes." if is_clean else "No."
        self._note(_experiment(run, f"Are {count} further steps clean with that?", answer, is_clean=is_clean, origin=None))
        return Remedy(text=text, override=override, verified=is_clean)

    def _try(self, policy: Policy, *, scale: float) -> Trial:
        trial = self._judged(self._replay.repeated(policy, scale=scale))
        if trial.fault is None or trial.fault.phase == "forward" or scale <= self._floor:
            return trial
        # Only the backward pass breaks: its loss scale may be what is too high now.
        return self._judged(self._replay.repeated(policy, scale=max(scale * _LOWERING, self._floor)))

    def _judged(self, run: Run) -> Trial:
        faults = Faults(Pair(low=run, full=self._full))
        index = faults.first("forward")
        if index is None and not run.is_finite:
            index = faults.first("backward")
            index = next((place for place, op in enumerate(run.ops) if op.nonfinite), len(run.ops) - 1) if index is None else index
        return Trial(run=run, fault=None if index is None else run.ops[index])


def _with(policy: Policy, overrides: Sequence[Override]) -> Policy:
    return replace(policy, overrides=(*policy.overrides, *overrides))


def _told(trial: Trial, question: str) -> Experiment:
    answer = "Yes." if trial.fault is None else f"No: {operation_name(trial.fault)} is not finite."
    return _experiment(trial.run, question, answer, is_clean=trial.fault is None, origin=trial.fault)


def _experiment(run: Run, question: str, answer: str, *, is_clean: bool, origin: OpRecord | None) -> Experiment:
    return Experiment(question=question, precision=str(run.policy), scale=run.scale, is_clean=is_clean, answer=answer, origin=origin)
