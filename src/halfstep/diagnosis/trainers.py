"""Training a task step by step, in a way that a step can be replayed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias, final

from halfstep.engine import MixedPrecision
from halfstep.errors import HalfstepWarning
from halfstep.policy import Policy
from halfstep.precision import HALVES
from halfstep.replay import StepCode, all_finite, compute_step
from halfstep.scaler import LossScaler
from halfstep.task import Task

__all__ = ["AbstractTrainer", "StepFate", "trainer_for"]

StepFate: TypeAlias = Literal["taken", "skipped", "infinite"]


class AbstractTrainer(ABC):
    """Trains a task by one step after the other; a step that fails changes nothing but random numbers."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """The loss scale of the next step."""

    @property
    @abstractmethod
    def floor(self) -> float:
        """The lowest loss scale that training would come down to."""

    @property
    @abstractmethod
    def stores_half(self) -> bool:
        """Whether parameters are stored in half precision, which an update alone may break."""

    @abstractmethod
    def lower(self, scale: float) -> None:
        """Goes on with another loss scale."""

    @abstractmethod
    def step(self, batch: Any) -> StepFate:
        """Trains by a step.

        Returns:
            What became of it: `skipped` where gradients were not finite; `infinite` where it was taken, but its loss is not finite.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the model as it was before, apart from its parameters."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """A block in which the model has no policy, for replays that bring their own."""


def trainer_for(task: Task, policy: Policy, *, loss_scale: float | None) -> AbstractTrainer:
    """A trainer for a task whose model is on its device.

    Args:
        task: The task.
        policy: What it runs in, with no `auto` in it.
        loss_scale: The first loss scale; `None` for no loss scaling.
    """
    trainable = (each for each in task.model.parameters() if each.requires_grad)
    if any(each.dtype in HALVES for each in trainable):
        return _PlainTrainer(task, policy)
    return _EngineTrainer(task, policy, loss_scale=loss_scale)


@final
class _EngineTrainer(AbstractTrainer):
    def __init__(self, task: Task, policy: Policy, *, loss_scale: float | None) -> None:
        self._task = task
        scaler = None
        if "fp16" in policy.precisions:
            scale = 1.0 if loss_scale is None else loss_scale
            scaler = LossScaler(init_scale=scale, min_scale=min(scale, 1.0), static=loss_scale is None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)  # That fp16 is emulated is no news to who looks at it.
            self._engine = MixedPrecision(task.model, task.optimizer, policy, scaler=scaler, max_consecutive_skips=None)
        self._scaler = scaler

    @property
    def scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    @property
    def stores_half(self) -> bool:
        return False

    @property
    def floor(self) -> float:
        return min(self.scale, 1.0)

    def lower(self, scale: float) -> None:
        if self._scaler is not None:
            self._scaler.update(scale)

    def step(self, batch: Any) -> StepFate:
        record = self._engine.train_step(self._task.loss, self._task.model, batch)
        loss = float(record.loss)
        if record.skipped:
            return "skipped"
        return "taken" if loss - loss == 0 else "infinite"

    def close(self) -> None:
        if self._engine.policy_handle is not None:
            self._engine.policy_handle.remove()

    def paused(self) -> AbstractContextManager[None]:
        return self._engine.without_policy()


@final
class _PlainTrainer(AbstractTrainer):
    """Trains parameters that are stored in half precision, which an engine refuses."""

    def __init__(self, task: Task, policy: Policy) -> None:
        self._task = task
        self._policy = policy

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def stores_half(self) -> bool:
        return True

    @property
    def floor(self) -> float:
        return 1.0

    def lower(self, scale: float) -> None:
        pass

    def step(self, batch: Any) -> StepFate:
        optimizer = self._task.optimizer
        optimizer.zero_grad()
        loss = compute_step(StepCode(model=self._task.model, parts=[(lambda: self._task.loss(self._task.model, batch), 1.0)]), self._policy)
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        failed = not (loss - loss == 0 and all_finite(gradients))
        if not failed:
            optimizer.step()
        optimizer.zero_grad()
        return "skipped" if failed else "taken"

    def close(self) -> None:
        pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()
