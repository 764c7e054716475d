"""Remedies that are tried: parts of a model in fp32, another loss scale, another precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from halfstep.numerics import OUTSIDE
from halfstep.policy import Override, Policy
from halfstep.records import Experiment, OpRecord, Precision, Remedy
from halfstep.replay.alignment import Pair
from halfstep.replay.deviations import Deviations
from halfstep.replay.faults import Faults
from halfstep.replay.islands import Islands
from halfstep.replay.runs import Replay, Run
from halfstep.replay.state import TrainingState
from halfstep.replay.updates import widen_optimizers
from halfstep.replay.verification import Course
from halfstep.replay.wording import island_text, operation_name

__all__ = ["Trial", "Trials"]

# So often a step is replayed in all for remedies to be found: in the forward pass, and elsewhere. The last replay is for another precision.
_MOST_REPLAYS: Final = {"forward": 6, "backward": 8}
_MOST_PRECISE: Final = 8

# So far back goes what is covered with an operation.
_DEEPEST: Final = 6

_CAST: Final = "aten._to_copy.default"

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
        index: The index of the operation that still breaks; `None` where the remedy holds.
    """

    run: Run
    index: int | None

    @property
    def fault(self) -> OpRecord | None:
        """The operation that still breaks."""
        return None if self.index is None else self.run.ops[self.index]


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

    def islands(self, run: Run, index: int, *, scale: float) -> tuple[Remedy, ...]:
        """The smallest island in fp32 with which nothing breaks, from what broke outwards; none where no island helps.

        Args:
            run: The run in which an operation broke.
            index: Its index.
            scale: The loss scale to try with.
        """
        growth = _Growth(Islands(self._replay.code.model, policy=self._policy))
        overrides = growth.around(run, index)
        most = _MOST_REPLAYS[run.ops[index].phase] - 1
        while overrides and self._replay.count < most:
            trial = self._try(_with(self._policy, overrides), scale=scale)
            text = Islands.text(overrides)
            self._note(_told(trial, f"Does {text} mend it?"))
            if trial.index is None:
                return (self.proven(island_text(overrides), trial.run, override=text),)
            overrides = growth.around(trial.run, trial.index)
        return ()

    def keeps(self, index: int, *, before: Pair, harm: float) -> tuple[Remedy, ...]:
        """The smallest island in fp32 that keeps the accuracy of an operation, and with it that of the loss and the gradients.

        Args:
            index: The index of the operation.
            before: The step without an island, and in fp32.
            harm: How far its loss and gradients are from those in fp32.
        """
        growth = _Growth(Islands(self._replay.code.model, policy=self._policy))
        overrides = growth.around(before.low, index)
        place, error = before.counterparts[index], before.errors[index] or 0.0
        while overrides and self._replay.count < _MOST_PRECISE:
            run = self._replay.repeated(_with(self._policy, overrides), scale=before.low.scale)
            pair = Pair(low=run, full=self._full)
            now = next((pair.errors[at] or 0.0 for at, other in enumerate(pair.counterparts) if other == place), 0.0)
            deviations = Deviations(pair)
            left = deviations.harm
            is_better = left < 1 or (left * _BETTER < harm and not any(True for _ in deviations.jumps()))
            is_kept = run.is_finite and now < _MENDED * error and is_better
            text = Islands.text(overrides)
            answer = f"Its error there is {now:.2g} in place of {error:.2g}."
            self._note(_experiment(run, f"Does {text} keep its accuracy?", answer, is_clean=is_kept, origin=None))
            if is_kept:
                return (self.proven(island_text(overrides), run, override=text),)
            overrides = growth.around(before.low, index)
        return ()

    def precision(self, precision: Precision, *, text: str) -> tuple[Remedy, ...]:
        """Another default precision; none where it breaks as well."""
        policy = replace(self._policy, default=precision) if not self._policy.pure else Policy.parse(f"pure {precision}")
        trial = self._try(policy, scale=1.0)
        self._note(_told(trial, f"Does {precision} mend it?"))
        return (self.proven(text, trial.run),) if trial.index is None else ()

    def stored_wide(self, text: str) -> Remedy:
        """Parameters and buffers in fp32 that were stored in half precision, with the same operations lowered."""
        state = TrainingState([*self._replay.parameters.values()], optimizers=self._course.optimizers)
        try:
            with self._replay.stored_wide():
                widen_optimizers(self._course.optimizers)
                run = self._replay.run(self._policy, scale=1.0)
                answer = "Yes." if run.is_finite else "No."
                self._note(_experiment(run, "Is it clean with parameters in fp32?", answer, is_clean=run.is_finite, origin=None))
                return self.proven(text, run) if run.is_finite else Remedy(text=text, override=None, verified=False)
        finally:
            state.put_back()

    def proven(self, text: str, run: Run, *, override: str | None = None) -> Remedy:
        """What a replay was clean with, put to the proof of further steps."""
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
        return Trial(run=run, index=index)


@final
class _Growth:
    """Islands that grow from an operation outwards: over the module around, and over what its arguments come from.

    Args:
        islands: What turns operations into overrides.
    """

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self._depth = 0

    def around(self, run: Run, index: int) -> tuple[Override, ...]:
        """Overrides that cover an operation of a run, and more than those before; none where there are no others to try."""
        overrides = self._islands.cover([run.ops[each] for each in _callers(run, index)])
        while not overrides and self._depth < _DEEPEST:
            self._depth += 1
            overrides = self._islands.cover([run.ops[each] for each in _ancestors(run, index, depth=self._depth)])
        return overrides


def _callers(run: Run, index: int) -> Sequence[int]:
    """An operation; for a cast, the operations that it was made for."""
    if run.ops[index].op != _CAST or run.ops[index].phase == "backward":
        return [index]
    return [index, *run.consumers.get(index, ())]


def _ancestors(run: Run, index: int, *, depth: int) -> Sequence[int]:
    """The operations that an operation goes back to in so many steps; for a cast, those that it was made for as well."""
    found = set(_callers(run, index))
    newest = found
    for _ in range(depth):
        newest = {source for each in newest for source in run.details[each].sources if source != OUTSIDE} - found
        found |= newest
    return sorted(found)


def _with(policy: Policy, overrides: Sequence[Override]) -> Policy:
    return replace(policy, overrides=(*policy.overrides, *overrides))


def _told(trial: Trial, question: str) -> Experiment:
    answer = "Yes." if trial.fault is None else f"No: {operation_name(trial.fault)} is not finite."
    return _experiment(trial.run, question, answer, is_clean=trial.fault is None, origin=trial.fault)


def _experiment(run: Run, question: str, answer: str, *, is_clean: bool, origin: OpRecord | None) -> Experiment:
    return Experiment(question=question, precision=str(run.policy), scale=run.scale, is_clean=is_clean, answer=answer, origin=origin)
