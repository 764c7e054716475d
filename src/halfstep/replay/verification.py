"""A remedy put to the proof: the step that failed, and three further steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import without_step_hooks
from halfstep.policy import Policy
from halfstep.replay.checks import all_finite
from halfstep.replay.runs import Replay, Run, StepCode
from halfstep.replay.state import TrainingState

__all__ = ["FURTHER", "Course", "plain_step"]

# So many steps after the one that failed have to be clean with a remedy.
FURTHER: Final = 3

# A dynamic loss scale would come down by itself where a further step is the first that it is too high for.
_BACKOFF: Final = 0.5
_LOWERINGS: Final = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """How training goes on after a step.

    Attributes:
        following: The steps that come after it.
        optimizers: What steps; where there are none, parameters stay as they are.
        max_grad_norm: What gradients are clipped to; `None` where they are not.
    """

    following: Sequence[StepCode]
    optimizers: Sequence[Optimizer]
    max_grad_norm: float | None = None

    def is_clean(self, replay: Replay, run: Run) -> bool:
        """Whether training goes on cleanly after a clean run of the step that failed, with its policy and scale; all is put back after.

        The loss scale may come down meanwhile, as a dynamic one does. Steps that raise are not clean.
        """
        state = TrainingState([*replay.parameters.values()], optimizers=self.optimizers)
        try:
            with replay.going_on():
                for name, gradient in run.gradients.items():
                    replay.parameters[name].grad = gradient.clone()
                scale = run.scale
                is_finite = self._step(replay, run)
                for code in self.following:
                    following = self._follow(replay, code, run.policy, scale=scale)
                    scale = following.scale
                    is_finite = is_finite and following.is_finite and self._step(replay, following, code=code)
                return is_finite
        except Exception:  # Whatever it is, training will come to it by itself, and tell.
            return False
        finally:
            state.put_back()

    def _follow(self, replay: Replay, code: StepCode, policy: Policy, *, scale: float) -> Run:
        floor = min(scale, 1.0)
        run = replay.follow(code, policy, scale=scale)
        for _ in range(_LOWERINGS):
            if run.is_finite or run.scale <= floor:
                break
            run = replay.follow(code, policy, scale=max(run.scale * _BACKOFF, floor))
        return run

    def _step(self, replay: Replay, run: Run, *, code: StepCode | None = None) -> bool:
        """Steps with the gradients that there are.

        Returns:
            Whether the parameters are finite afterwards.
        """
        parameters = [*replay.parameters.values()]
        self._finish(parameters, scale=run.scale)

        def again() -> Tensor:
            loss = replay.follow(code or replay.code, run.policy, scale=run.scale).loss
            self._finish(parameters, scale=run.scale)
            return torch.tensor(loss)

        for optimizer in self.optimizers:
            plain_step(optimizer, again)
        return all_finite(parameters)

    def _finish(self, parameters: Sequence[Tensor], *, scale: float) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        with torch.no_grad():
            for gradient in gradients:
                gradient.div_(scale)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)


def plain_step(optimizer: Optimizer, closure: Any) -> None:
    """The step of an optimizer's class, whatever was put in its place by a scheduler or a scaler; no hook is called."""
    step: Any = type(optimizer).step
    parameter = inspect.signature(step).parameters.get("closure")
    needs_closure = parameter is not None and parameter.default is inspect.Parameter.empty
    with without_step_hooks(optimizer):
        step(optimizer, *([closure] if needs_closure else []))
