"""Several precisions run in turns, step by step, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Final, TypeAlias, final

import torch
from torch import nn

from halfstep.comparison.contender import Contender, ProfiledStep, RunOptions, StepOverdueError, TimedStep
from halfstep.errors import HalfstepError, TaskError
from halfstep.policy import Policy
from halfstep.records import Outcome, Precision
from halfstep.task import TaskFactory

__all__ = ["Plan", "Progress", "RaceResult", "Tally", "race"]

# A step may always take this long, whatever the baseline takes: to stop earlier saves nobody anything.
_PATIENCE_S: Final = 10.0
# A precision that would keep the user waiting longer than this in all, while far slower than the baseline, runs a few steps only.
_TOTAL_PATIENCE_S: Final = 30.0
_FEW_STEPS: Final = 3

_NO_POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({})

Progress: TypeAlias = Callable[[int, int, str], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many steps a comparison runs.

    Attributes:
        steps: Measured steps of each precision for each seed.
        warmup: Steps before those, at least one; the last of them for each seed is profiled, if its time says anything.
        seeds: The seeds.
        max_slowdown: A precision whose step takes more than so many times the baseline's is cut short.
    """

    steps: int
    warmup: int
    seeds: tuple[int, ...]
    max_slowdown: float


@final
@dataclass(slots=True, kw_only=True)
class Tally:
    """What is known of one precision, or policy, so far.

    Attributes:
        precision: The precision, or the name of the policy.
        policy: The policy; `None` for a precision.
        timed: Whether its times say anything: those of a rehearsal are no times of the device that is rehearsed.
        seconds: Measured step times by (seed index, round), so that rounds of two precisions can be paired; skipped steps have none.
        samples: Samples in each measured step whose batch tells.
        losses: For each seed the loss of every step.
        skipped_at: For each seed the numbers of the skipped steps.
        final_scale: The loss scale after the last step.
        memory: The profile of the first seed's last warm-up step, which all precisions run on the same batch: its memory is compared.
        profiled: The profile of a warm-up step whose time is explained: of all seeds, the one that other programs disturbed least.
        note: Why it was cut short; empty while it runs.
        outcome: `complete` unless it was cut short by its slowness or by an error.
    """

    precision: str
    policy: Policy | None = None
    timed: bool = True
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    losses: list[tuple[float, ...]] = field(default_factory=list)
    skipped_at: list[tuple[int, ...]] = field(default_factory=list)
    final_scale: float | None = None
    memory: ProfiledStep | None = None
    profiled: ProfiledStep | None = None
    note: str = ""
    outcome: Outcome = "complete"

    def see(self, profiled: ProfiledStep) -> None:
        """Keeps the first profile, and the one whose step took the least time."""
        self.memory = self.memory or profiled
        if self.profiled is None or profiled.profile.total_us < self.profiled.profile.total_us:
            self.profiled = profiled

    def measure(self, timed: TimedStep, *, at: tuple[int, int]) -> None:
        """Counts a measured step. A skipped one is quicker, since no optimizer ran in it: its time says nothing."""
        if timed.record.skipped:
            return
        if self.timed:
            self.seconds[at] = timed.seconds
        if timed.samples is not None:
            self.samples.append(timed.samples)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """What a race found.

    Attributes:
        tallies: One for each precision, in the order in which they were named, and then one for each policy.
        interrupted: Whether Ctrl-C ended it early.
    """

    tallies: tuple[Tally, ...]
    interrupted: bool


def race(
    factory: TaskFactory,
    *,
    precisions: Sequence[Precision],
    policies: Mapping[str, Policy] = _NO_POLICIES,
    plan: Plan,
    options: RunOptions,
    progress: Progress,
) -> RaceResult:
    """Runs the precisions and the policies in turns, for one seed after the other.

    Warm-up steps are not measured, and run one precision after the other. The order of the measured steps changes from round to round, so
    that each precision follows each other one as often as it precedes it. The first precision is the baseline: an error in it ends the
    race, while an error in another is noted and the rest goes on.

    Args:
        factory: Makes the task.
        precisions: The baseline and what is compared with it.
        policies: Policies that are compared with it, too, by their names.
        plan: How many steps.
        options: How they are run.
        progress: Called before each step with the number of steps done, of all steps, and what runs now.

    Returns:
        What was measured; after Ctrl-C, what was measured until then.

    Raises:
        HalfstepError: The baseline failed.
        KeyboardInterrupt: Ctrl-C came before the baseline had a measured step.
    """
    tallies = _tallies(precisions, policies, timed=options.target is None)
    running = _Race(factory, tallies=tallies, plan=plan, options=options, progress=progress)
    interrupted = False
    try:
        for index in range(len(plan.seeds)):
            running.run_seed(index)
    except KeyboardInterrupt:
        if not any(len(seed) > plan.warmup for seed in running.tallies[0].losses):
            raise
        interrupted = True
    return RaceResult(tallies=tuple(running.tallies), interrupted=interrupted)


def _tallies(precisions: Sequence[Precision], policies: Mapping[str, Policy], *, timed: bool) -> list[Tally]:
    named = [*((each, None) for each in precisions), *policies.items()]
    return [Tally(precision=name, policy=policy, timed=timed) for name, policy in named]


@final
class _Race:
    """The state of a race."""

    def __init__(self, factory: TaskFactory, *, tallies: list[Tally], plan: Plan, options: RunOptions, progress: Progress) -> None:
        self._factory = factory
        self._plan = plan
        self._options = options
        self._progress = progress
        self.tallies = tallies
        self._done = 0
        self._contenders: dict[int, Contender] = {}
        self._baseline_s = math.inf
        self._trained: dict[int, weakref.ref[nn.Parameter]] = {}

    def run_seed(self, index: int) -> None:
        """Runs all steps of one seed."""
        if self._options.compile:
            # A function is compiled anew for each precision, each shape and, in some models, each seed, and torch falls back to running it
            # uncompiled after a few times. What earlier seeds compiled comes back from torch's cache on disk.
            torch.compiler.reset()
        try:
            # Who is made first gets the better places in memory, if there are any: the next seed, another one.
            for number in self._order(index, among=range(len(self.tallies))):
                if not self.tallies[number].note:
                    self._guard(number, lambda number=number: self._enter(number, self._plan.seeds[index]))  # type: ignore[misc]
            for number in sorted(self._contenders):
                self._guard(number, lambda number=number: self._warm_up(number, index))  # type: ignore[misc]
            for turn in range(self._plan.steps):
                self._run_round((index, turn))
            for number in list(self._contenders):
                if self.tallies[number].timed and self.tallies[number].memory is None:
                    self._guard(number, lambda number=number: self._profile_late(number))  # type: ignore[misc]
        finally:
            for number in list(self._contenders):
                self._leave(number)

    def _run_round(self, at: tuple[int, int]) -> None:
        order = self._order(
            sum(at), among=self._contenders
        )  # So the first round of a seed, when caches are cold, does not begin with the same one each time.
        for number in order:
            self._guard(number, lambda number=number: self._measure(number, at))  # type: ignore[misc]
        for number in order:
            self._cut_short(number)

    def _guard(self, number: int, act: Callable[[], None]) -> None:
        """Notes an error in any precision but the baseline, and takes the precision out of the race."""
        try:
            act()
        except StepOverdueError as error:
            self._drop(number, outcome="stopped", note=f"It {error}; {self.tallies[0].precision} needs {self._baseline_s:.2g} s.")
        except HalfstepError as error:
            if number == 0:
                raise
            self._drop(number, outcome="failed", note=str(error))

    def _enter(self, number: int, seed: int) -> None:
        tally = self.tallies[number]
        contender = Contender(self._factory, precision=tally.precision, policy=tally.policy, seed=seed, options=self._options)
        for parameter in contender.parameters():
            known = self._trained.get(id(parameter))
            if known is not None and known() is parameter:
                contender.close()
                raise TaskError(
                    "The factory returned a model that it had returned before, so that one run would train the weights of another. "
                    "Make the model inside the factory, anew for each call."
                )
            self._trained[id(parameter)] = weakref.ref(parameter)
        self._contenders[number] = contender

    def _leave(self, number: int) -> None:
        contender = self._contenders.pop(number, None)
        if contender is None:
            return
        contender.close()
        tally = self.tallies[number]
        if not contender.losses:
            return
        planned = self._plan.warmup + self._plan.steps
        tally.losses.append(tuple(contender.losses[:planned]))
        tally.skipped_at.append(tuple(step for step in contender.skipped_at if step <= planned))
        tally.final_scale = contender.final_scale

    def _warm_up(self, number: int, index: int) -> None:
        contender, tally = self._contenders[number], self.tallies[number]
        for warm in range(self._plan.warmup):
            self._tell(f"{tally.precision}, warm-up")
            if not tally.timed:
                contender.step()
                continue
            limit = self._limit(number) if (index, warm) == (0, 0) else None
            if warm == self._plan.warmup - 1:
                if tally.memory is None:
                    # Memory of others that is freed during the step would count as if this step had given it back.
                    gc.collect()
                timed, profiled = contender.profiled_step(limit_s=limit)
                if not timed.record.skipped:
                    tally.see(profiled)
            else:
                timed = contender.step(limit_s=limit)
            if number == 0:
                self._baseline_s = min(self._baseline_s, timed.seconds)

    def _limit(self, number: int) -> float:
        """How long the first step of all may take, which shows whether a precision is bearable.

        The baseline may take any time, but is watched like the others: with one step of warm-up this step is profiled, and to be watched
        changes what it holds. Further steps are not watched, so that their profiles are undisturbed.
        """
        return math.inf if number == 0 else max(_PATIENCE_S, self._plan.max_slowdown * self._baseline_s)

    @staticmethod
    def _order(turn: int, *, among: Iterable[int]) -> list[int]:
        """Who runs when: every second round is reversed, and after two rounds another one comes first.

        So each precision has each place equally often, and follows each other one equally often (Williams, 1949, Australian Journal of
        Scientific Research A2, 149).
        """
        order = sorted(among)
        first = turn // 2 % len(order)
        order = order[first:] + order[:first]
        return order[::-1] if turn % 2 else order

    def _profile_late(self, number: int) -> None:
        """Profiles a step after the measured ones, where the warm-up step was skipped: no optimizer ran in it. Its loss does not count."""
        contender = self._contenders[number]
        scale = contender.final_scale
        timed, profiled = contender.profiled_step()
        contender.final_scale = scale
        if not timed.record.skipped:
            self.tallies[number].see(profiled)

    def _measure(self, number: int, at: tuple[int, int]) -> None:
        tally = self.tallies[number]
        self._tell(f"{tally.precision}, seed {self._plan.seeds[at[0]]}")
        tally.measure(self._contenders[number].step(), at=at)

    def _cut_short(self, number: int) -> None:
        """Takes a precision out that has run a few steps, each of them many times slower than the baseline's."""
        tally = self.tallies[number]
        if number == 0 or number not in self._contenders or len(tally.seconds) < _FEW_STEPS:
            return
        own, baseline = median(tally.seconds.values()), median(self.tallies[0].seconds.values())
        left = self._plan.steps * len(self._plan.seeds) - len(tally.seconds)
        if own > self._plan.max_slowdown * baseline and left * own > _TOTAL_PATIENCE_S:
            slower = own / baseline
            note = f"It ran {len(tally.seconds)} measured steps only, since each takes {slower:.0f} times as long as the baseline's."
            self._drop(number, outcome="stopped", note=note)

    def _drop(self, number: int, *, outcome: Outcome, note: str) -> None:
        self.tallies[number].outcome = outcome
        self.tallies[number].note = note
        self._leave(number)

    def _tell(self, what: str) -> None:
        per_seed = self._plan.steps + self._plan.warmup
        # A precision that has left the race has no steps to come.
        total = sum(per_seed * len(self._plan.seeds) if not tally.note else sum(map(len, tally.losses)) for tally in self.tallies)
        self._progress(self._done, max(total, self._done + 1), what)
        self._done += 1
