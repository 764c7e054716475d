"""Why steps are skipped, found out by itself once so many were skipped in a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.distributed import Ranks
from halfstep.engine.gradient_step import Outcome
from halfstep.errors import HalfstepWarning, StepOrderError
from halfstep.numerics import Trace, rehearsed_target, users_level
from halfstep.policy import Policy
from halfstep.randomness import RandomState
from halfstep.records import Diagnosis, StepRecord
from halfstep.replay import (
    FURTHER,
    Circumstances,
    Course,
    KeptBatch,
    StepCode,
    diagnosis_of,
    diagnosis_of_trace,
    examine_step,
    open_trace,
    warning_text,
)
from halfstep.scaler import LossScaler, SkipCounts, Verdict

__all__ = ["SkipInquiry"]


class _Engine(Protocol):
    """What there is to know of an engine."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    policy: Policy
    device: torch.device
    scaler: torch.amp.GradScaler | None
    max_grad_norm: float | None
    ranks: Ranks | None

    def without_policy(self) -> AbstractContextManager[None]:
        """A block in which the model is as it was before the engine."""


@final
class SkipInquiry:
    """Counts the skips in a row of one engine, and diagnoses at the limit.

    A step of `train_step` is replayed. In a loop of the user's own there is nothing to replay: the step that follows is traced as it runs,
    and the same on several ranks, where a replay on one of them would wait for the others. A healthy run pays for a count.

    Args:
        engine: The engine, which is not kept alive.
        limit: So many skips in a row.

    Attributes:
        diagnosis: What was found last; `None` before that.
    """

    def __init__(self, engine: _Engine, *, limit: int) -> None:
        self.diagnosis: Diagnosis | None = None
        self._engine = ref(engine)
        self._limit = limit
        self._can_replay = engine.ranks is None
        self._counts = SkipCounts(limit=limit)
        self._is_due = False
        self._is_told = False
        self._seen: Trace | None = None
        self._traced: Trace | None = None

    @property
    def is_near(self) -> bool:
        """Whether the next step may be the one that is replayed: what it begins with has to be known then."""
        return self._can_replay and not self._is_told and self._counts.may_reach_limit

    def start(self) -> None:
        """A step begins that nobody can replay: it is traced if it is time, unless the user traces it."""
        if not self._is_due or self._seen is not None:
            return
        self._seen = open_trace(self._owner().model)
        self._is_due = self._seen is None

    def end(self) -> None:
        """The step has ended, and what follows is no part of it."""
        if self._seen is not None:
            self._seen.__exit__(None, None, None)
            self._traced, self._seen = self._seen, None

    def give_up(self) -> None:
        """The step in progress was given up; the next one is traced in its place."""
        if self._seen is not None:
            self.end()
            self._traced, self._is_due = None, True

    def see(self, outcome: Outcome) -> None:
        """Takes in what became of a step, when all else is done."""
        found = outcome.found_inf if outcome.found_inf is not None else torch.zeros(())
        has_reached = self._counts.add([Verdict(owner=None, found_inf=found, stepped=True, skipped=outcome.skipped)]) is not None
        if not has_reached:
            self._is_told = False
        self._is_due = has_reached and not self._is_told
        if self._traced is not None:
            traced, self._traced, self._is_due = self._traced, None, False
            self._is_told = has_reached
            self._tell_of(traced, scale=float(outcome.scale))

    def replay(
        self, fn: Callable[..., Tensor], parts: Sequence[tuple[Any, float]], *, random: RandomState | None, record: StepRecord
    ) -> None:
        """Replays the step of `train_step` that has just been skipped, if it is time.

        Args:
            fn: What computes the loss.
            parts: The micro-batches, with their shares.
            random: The random numbers that the step began with.
            record: What became of it.
        """
        if not self._is_due or not self._can_replay:
            return
        self._is_due, self._is_told = False, True
        engine = self._owner()
        kept = [(KeptBatch(part), share) for part, share in parts]
        code = StepCode(
            model=engine.model,
            parts=[(partial(_computed, fn, part), 1 / share) for part, share in kept],
            batch=[part.batch for part, _ in kept] if len(kept) > 1 else kept[0][0].batch,
        )
        circumstances = Circumstances(
            policy=engine.policy,
            scale=record.scale,
            floor=self._floor(record.scale),
            has_failed=True,
            course=Course(following=[code] * FURTHER, optimizers=engine.optimizers, max_grad_norm=engine.max_grad_norm),
        )
        try:
            with engine.without_policy():
                outcome = examine_step(code, device=engine.device, circumstances=circumstances, step=record.step, random=random)
        except StepOrderError:  # The user traces already; there will be another step.
            self._is_told = False
            return
        finally:
            for part, _ in kept:
                part.put_back()
        self._tell(
            diagnosis_of(
                outcome,
                task=getattr(fn, "__qualname__", type(fn).__name__),
                policy=engine.policy,
                target=rehearsed_target(),
                device=engine.device,
                steps=record.step,
                skips=self._counts.read()[1],
            )
        )

    def _tell_of(self, seen: Trace, *, scale: float) -> None:
        engine = self._owner()
        steps, skips, _ = self._counts.read()
        self._tell(
            diagnosis_of_trace(
                seen,
                model=engine.model,
                policy=engine.policy,
                device=engine.device,
                scale=scale,
                floor=self._floor(scale),
                steps=steps,
                skips=skips,
            )
        )

    def _floor(self, scale: float) -> float:
        scaler = self._owner().scaler
        return min(scaler.settings.min_scale if isinstance(scaler, LossScaler) else 1.0, scale) or 2.0**-14

    def _owner(self) -> _Engine:
        engine = self._engine()
        assert engine is not None, "it is the engine that calls"
        return engine

    def _tell(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        text = f"{warning_text(diagnosis, skips=self._limit)} amp.diagnosis holds all of it."
        warnings.warn(text, HalfstepWarning, stacklevel=users_level())


def _computed(fn: Callable[..., Tensor], batch: KeptBatch) -> Tensor:
    return fn(*batch.given())
