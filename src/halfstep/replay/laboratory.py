"""What an examination works with: the step, what is known of it, and the notes that are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from halfstep.policy import Policy
from halfstep.records import Experiment, OpRecord
from halfstep.replay.faults import own_faults
from halfstep.replay.remedies import Trials
from halfstep.replay.runs import Replay, Run
from halfstep.replay.verification import Course
from halfstep.replay.wording import operation_name

__all__ = ["Circumstances", "Laboratory", "yes"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circumstances:
    """What there is to know of a step that is to be examined.

    Attributes:
        policy: What it runs in, with no `auto` in it.
        scale: Its loss scale; 1 without loss scaling.
        floor: The lowest loss scale that training would come down to.
        has_failed: Whether it was skipped, or its loss or gradients were not finite; `None` where it was not trained yet.
        course: How training goes on after it.
        since: For parameters that became non-finite, the steps that made them so, by name.
    """

    policy: Policy
    scale: float
    floor: float
    has_failed: bool | None
    course: Course
    since: Mapping[str, int] = field(default_factory=dict)


@final
class Laboratory:
    """The step under examination, its circumstances, and what was tried.

    Args:
        replay: The step, open.
        circumstances: What is known of it.
        progress: Called with what is about to be tried.

    Attributes:
        replay: The step.
        policy: What it runs in.
        scale: Its loss scale.
        floor: The lowest loss scale.
        course: How training goes on.
        progress: Called with what is about to be tried.
        evidence: What was tried, in order.
    """

    def __init__(self, replay: Replay, circumstances: Circumstances, *, progress: Callable[[str], None]) -> None:
        self.replay = replay
        self.policy = circumstances.policy
        self.scale = circumstances.scale
        self.floor = min(circumstances.floor, circumstances.scale)
        self.course = circumstances.course
        self.progress = progress
        self.evidence: list[Experiment] = []

    def trials(self, full: Run) -> Trials:
        """Remedies to try, with the step in fp32 to compare with."""
        return Trials(self.replay, policy=self.policy, full=full, course=self.course, floor=self.floor, note=self.evidence.append)

    def widen(self) -> Run:
        """Runs the step in fp32."""
        self.progress("a replay in fp32")
        full = self.replay.widened(self.policy)
        index = None if full.is_finite else own_faults(full)
        origin = None if index is None else full.ops[index]
        answer = "Yes." if full.is_finite else f"No: {operation_name(origin)} is not finite." if origin else "No."
        self.note(full, "Is it finite in fp32?", answer, precision="fp32", origin=origin)
        return full

    def note(
        self, run: Run, question: str, answer: str, *, is_clean: bool | None = None, precision: str = "", origin: OpRecord | None = None
    ) -> None:
        """Takes down what a run was to tell, and what it told."""
        self.evidence.append(
            Experiment(
                question=question,
                precision=precision or str(run.policy),
                scale=run.scale,
                is_clean=run.is_finite if is_clean is None else is_clean,
                answer=answer,
                origin=origin,
            )
        )


def yes(*, holds: bool) -> str:
    """The answer to a question."""
    return "Yes." if holds else "No."
