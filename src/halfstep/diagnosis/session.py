"""Training until a step fails, and the examination of that step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, final

import torch

from halfstep.batch import move_batch
from halfstep.diagnosis.trainers import AbstractTrainer
from halfstep.errors import TaskError
from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.replay import (
    FURTHER,
    Circumstances,
    Course,
    KeptBatch,
    Outcome,
    StepCode,
    TrainingState,
    all_finite,
    examine_step,
    examine_update,
    nonfinite_tensors,
)
from halfstep.task import BatchStream, Task, blamed

__all__ = ["TaskSession"]

# So often a loss scale that is too high is lowered, and training goes on; after that it is the finding.
_LOWERINGS: Final = 8


@final
class TaskSession:
    """Trains a task and examines its first step, its last step, and each that fails.

    Args:
        task: The task, its model on the device.
        trainer: What trains it.
        policy: What it runs in.
        device: The device.
        progress: Called as `progress(steps, what)`.

    Attributes:
        steps: How many steps were begun.
        skips: How many of them failed.
        outcome: What was found until now: the first of all findings, but a loss scale that was too high only where nothing else is.
    """

    def __init__(
        self, task: Task, trainer: AbstractTrainer, *, policy: Policy, device: torch.device, progress: Callable[[int, str], None]
    ) -> None:
        self.steps = 0
        self.skips = 0
        self.outcome: Outcome | None = None
        self._task = task
        self._trainer = trainer
        self._policy = policy
        self._device = device
        self._progress = progress
        self._stream = BatchStream(task.batches)
        self._upcoming: deque[KeptBatch] = deque()
        self._since: dict[str, int] = {}
        self._is_suspicious = False

    def train(self, max_steps: int) -> None:
        """Trains until something is found that is more than a loss scale that was too high, and for so many steps at most.

        Batches that come to an end, and cannot be started again, end it as well.
        """
        while self.steps < max_steps:
            self.steps += 1
            self._progress(self.steps, "training")
            try:
                batch = self._next()
            except TaskError:
                if not self._stream.has_ended:
                    raise
                self.steps -= 1
                return
            random = RandomState.capture()
            if (self.steps in (1, max_steps) or self._is_suspicious) and self._examine_ahead(batch, random):
                return
            random.restore()
            scale = self._trainer.scale
            before = self._state() if self._trainer.stores_half else None
            with blamed(f"Step {self.steps} failed"):
                fate = self._trainer.step(batch.given())
            if fate != "skipped":
                # A step that was taken cannot be replayed: where it left something that is not finite, the next one is looked into.
                self._is_suspicious = self._looks_broken() or fate == "infinite"
                if before is not None and self._since and self._take(self._examined_update(batch, random, before)):
                    return
                continue
            self.skips += 1
            if self._take(self._examined(batch, random, scale=scale, has_failed=True)):
                return

    def _examine_ahead(self, batch: KeptBatch, random: RandomState) -> bool:
        """Examines a step before it is trained, again with a lower loss scale where that is what is too high.

        Returns:
            Whether training ends with it.
        """
        for _ in range(_LOWERINGS):
            outcome = self._examined(batch, random, scale=self._trainer.scale, has_failed=None)
            self.skips += not outcome.evidence[0].is_clean  # It would have been skipped.
            if self._take(outcome):
                return True
            if outcome.finding.cause != "scale":
                return False
        return True

    def _take(self, outcome: Outcome) -> bool:
        """Keeps what was found, unless something else was that weighs more.

        Returns:
            Whether training ends with it.
        """
        finding, known = outcome.finding, self.outcome
        ends = finding.is_fault or not finding.is_reproduced
        if ends or known is None or known.finding.cause == "healthy":
            self.outcome = outcome
        if finding.cause == "scale":
            self._trainer.lower(min(finding.passing_scale or self._trainer.floor, self._trainer.scale))
        return ends

    def _examined(self, batch: KeptBatch, random: RandomState, *, scale: float, has_failed: bool | None) -> Outcome:
        circumstances = self._circumstances(scale=scale, has_failed=has_failed)
        with blamed(f"Step {self.steps} failed when it was replayed"), self._trainer.paused():
            return examine_step(
                self._code(batch),
                device=self._device,
                circumstances=circumstances,
                step=self.steps,
                random=random,
                progress=lambda what: self._progress(self.steps, what),
            )

    def _examined_update(self, batch: KeptBatch, random: RandomState, before: TrainingState) -> Outcome:
        """Examines a step that was taken, and whose update broke parameters, from where it began."""
        broken = [each for each in nonfinite_tensors(None, self._task.model, since=self._since) if each.kind == "parameter"]
        before.put_back()
        circumstances = self._circumstances(scale=1.0, has_failed=None)
        with blamed(f"Step {self.steps} failed when it was replayed"):
            code = self._code(batch)
            return examine_update(code, device=self._device, circumstances=circumstances, step=self.steps, random=random, broken=broken)

    def _state(self) -> TrainingState:
        return TrainingState([*self._task.model.parameters()], optimizers=[self._task.optimizer])

    def _circumstances(self, *, scale: float, has_failed: bool | None) -> Circumstances:
        return Circumstances(
            policy=self._policy,
            scale=scale,
            floor=min(self._trainer.floor, scale),
            has_failed=has_failed,
            course=Course(following=[self._code(each) for each in self._peek(FURTHER)], optimizers=[self._task.optimizer]),
            since=self._since,
        )

    def _code(self, batch: KeptBatch) -> StepCode:
        parts = [(lambda: self._task.loss(self._task.model, batch.given()), 1.0)]
        return StepCode(model=self._task.model, parts=parts, batch=batch.batch)

    def _next(self) -> KeptBatch:
        return self._upcoming.popleft() if self._upcoming else self._draw()

    def _peek(self, count: int) -> list[KeptBatch]:
        try:
            while len(self._upcoming) < count:
                self._upcoming.append(self._draw())
        except TaskError:
            if not self._stream.has_ended:
                raise
        return list(self._upcoming)[:count]

    def _draw(self) -> KeptBatch:
        return KeptBatch(move_batch(next(self._stream), device=self._device))

    def _looks_broken(self) -> bool:
        """Notes parameters that are not finite any more; whether there are such."""
        if all_finite(self._task.model.parameters()):
            return False
        for name, each in self._task.model.named_parameters():
            if not all_finite([each]):
                self._since.setdefault(name, self.steps)
        return True
