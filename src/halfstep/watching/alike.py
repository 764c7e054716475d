"""Steps that are like those before them, of which the numbers alone are taken.

In a loop of small steps each call of a Python function is felt. So what is done in every step lies here, in few functions, and what looks
at a step closely lies elsewhere and runs in one step of many.
"""

from __future__ import annotations

from math import nan
from time import perf_counter
from typing import Any, TypeAlias, final

from torch import Tensor

from halfstep._torch import backward_node, version_of
from halfstep.watching.aftermath import Aftermath
from halfstep.watching.measures import number_of, scaled_down, total_of
from halfstep.watching.scene import Scene, current_scale
from halfstep.watching.states import OptimizerState

__all__ = ["AlikeSteps"]


# A backward pass that runs: its loss, the optimizer, and a parameter of that with its gradient before it.
_Pass: TypeAlias = "tuple[float | Tensor, OptimizerState, Tensor, Tensor | None]"


@final
class AlikeSteps:
    """What is taken in of steps while they are not looked at.

    Args:
        scene: What is known of the process.
        aftermath: What is taken in of skipped steps.
    """

    def __init__(self, scene: Scene, aftermath: Aftermath) -> None:
        self._scene = scene
        self._aftermath = aftermath

    def begin_pass(self, tensors: Any) -> _Pass | None:
        """A backward pass is about to run; returns what `end_pass` is to be given, `None` for nothing."""
        if backward_node() is not None:
            return None
        if type(tensors) is Tensor:
            loss = number_of(tensors)
        elif isinstance(tensors, list | tuple) and all(isinstance(each, Tensor) for each in tensors):
            loss = total_of([number_of(each) for each in tensors])
        else:
            return None
        owner = self._scene.last
        sample = None if owner is None or owner.sample is None else owner.sample()
        if owner is None or sample is None:
            self._scene.losses.append(loss)
            return None
        gradient = sample.grad
        if gradient is None or version_of(gradient) != owner.sample_version:  # What was there is gone.
            self._scene.losses.clear()
        return loss, owner, sample, gradient

    def end_pass(self, begun: _Pass) -> None:
        """It has run. What has not reached the optimizer is not its loss."""
        loss, owner, sample, before = begun
        gradient = sample.grad
        version = -1 if gradient is None else version_of(gradient)
        if gradient is not None and (gradient is not before or version != owner.sample_version):
            owner.sample_version = version
            self._scene.losses.append(loss)
        else:  # Unless no other pass does, and the parameter has no part in this step.
            self._scene.others.append(loss)

    def clipped(self) -> None:
        """Gradients were clipped, which is no new beginning."""
        owner = self._scene.last
        sample = None if owner is None or owner.sample is None else owner.sample()
        if owner is not None and sample is not None and sample.grad is not None:
            owner.sample_version = version_of(sample.grad)

    def clip(self, parameters: Any, total_norm: Any) -> None:
        """Gradients are clipped to a norm by a loop whose clipping was looked at before."""
        owner = self._scene.last
        if owner is not None and owner.norm is None:
            scaler = owner.scaler.scaler() if owner.clips_scaled and owner.scaler is not None else None
            scale = 1.0 if scaler is None else current_scale(scaler)
            owner.take_norm(len(parameters), total_norm, scale=scale, norm_type=self._scene.thread.norm_type)

    def begin_step(self, scaler: Any, optimizer: Any) -> OptimizerState | None:
        """A scaler is about to step an optimizer; returns that, if both are those of the step before."""
        owner = self._scene.last
        if owner is None or owner.optimizer() is not optimizer:
            return None
        state = owner.scaler
        if state is None or state.pending or state.scaler() is not scaler:
            return None
        state.scale = current_scale(scaler)
        owner.is_running, owner.found_inf = False, None
        self._scene.thread.stepping = owner
        return owner

    def end_step(self, owner: OptimizerState) -> None:
        """It has."""
        state = owner.scaler
        assert state is not None
        losses = [scaled_down(each, state.scale) for each in self._scene.losses or self._scene.others]
        self.finish(owner, owner.is_skipped(), state.scale, losses)
        state.steps += 1
        state.pending.append(owner)

    def updated(self, scaler: Any) -> bool:
        """A scaler has updated; returns whether that is all that there is to it."""
        owner = self._scene.last
        state = None if owner is None else owner.scaler
        if state is None or state.scaler() is not scaler or self._scene.acts:
            return False
        state.updates += 1
        state.pending.clear()
        return True

    def finish(self, owner: OptimizerState, skipped: bool | Tensor, scale: float | Tensor, losses: list[float | Tensor]) -> None:  # noqa: FBT001
        """A step has ended.

        Args:
            owner: The optimizer.
            skipped: Whether the step was not taken.
            scale: Its loss scale.
            losses: What its gradients are those of, without the scale.
        """
        scene = self._scene
        optimizer: Any = owner.optimizer()
        owner.steps += 1
        scene.steps += 1
        group = optimizer.param_groups[0] if optimizer.param_groups else {"params": []}
        lr = group.get("lr", nan)
        measures = scene.measures
        now = perf_counter()
        seconds, measures.ended = now - measures.ended, now
        measures.count += 1
        facts = (
            owner.steps,
            skipped,
            scale,
            losses,
            None if skipped is True else owner.norm,
            lr if type(lr) is float else _rate(lr),
            seconds,
            None if measures.count % measures.MEMORY_EVERY else measures.memory(group["params"]),
            owner.precision,
            scene.epoch,
            owner.name,
            owner.use,
        )
        owner.norm = None
        owner.last_skipped = skipped
        scene.observe(owner, facts, owner.last_line)
        if skipped is True:
            self._aftermath.check_buffers(owner, owner.steps, owner.last_line)
        scene.has_stepped(owner)


def _rate(lr: object) -> float | Tensor:
    """A learning rate as a number; NaN where it is none, as where an optimizer finds its own."""
    if isinstance(lr, Tensor):
        return number_of(lr)
    return float(lr) if isinstance(lr, int | float) else nan
