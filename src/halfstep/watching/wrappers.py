"""What stands around the functions of torch that make up a training step. Each function here returns what makes a wrapper of a function.

Where a function is called in each step, errors are caught in place, since one more call of a Python function would be felt there; elsewhere
events are `guarded`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep._torch import kept_out_of_graphs
from halfstep.watching.aftermath import Aftermath
from halfstep.watching.alike import AlikeSteps
from halfstep.watching.passes import BackwardEvents
from halfstep.watching.scaling import ScalerEvents
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState
from halfstep.watching.stepping import StepEvents

__all__ = [
    "Make",
    "around_backward",
    "around_clipping",
    "around_optimizer_step",
    "around_scale",
    "around_schedule",
    "around_state_dict",
    "around_step",
    "around_total_norm",
    "around_unscale",
    "around_update",
    "once_made",
]

Make = Callable[[Any], Callable[..., Any]]

_frame = sys._getframe


def around_backward(scene: Scene, passes: BackwardEvents, alike: AlikeSteps) -> Make:
    """For `torch.autograd.backward`, which `Tensor.backward` calls."""

    def make(original: Any) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not scene.is_active:
                return original(tensors, *args, **kwargs)
            begun = alike_begun = None
            try:
                if scene.is_looking:
                    begun = passes.begin(tensors, args, kwargs, _frame(1))
                else:
                    alike_begun = alike.begin_pass(tensors)
            except Exception as error:
                scene.failed(error)
            result = original(tensors, *args, **kwargs)
            try:
                if begun is not None:
                    passes.end(begun)
                elif alike_begun is not None:
                    alike.end_pass(alike_begun)
            except Exception as error:
                scene.failed(error)
            return result

        return backward

    return make


def once_made(scene: Scene, see: Callable[[Any, Any], None]) -> Make:
    """For the `__init__` of something that is followed.

    Args:
        scene: What is known of the process.
        see: Is given it, and the frame that made it.
    """
    made = scene.guarded(see)

    def make(original: Any) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if scene.is_active:
                made(self, _frame(1))

        return init

    return make


def around_scale(scene: Scene, scalers: ScalerEvents) -> Make:
    """For `GradScaler.scale`."""
    scaled = scene.guarded(scalers.scaled)

    def make(original: Any) -> Callable[..., Any]:
        def scale(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if scene.is_active and scene.is_looking and not scene.thread.depth:
                scaled(self, result, _frame(1))
            return result

        return scale

    return make


def around_unscale(scene: Scene, scalers: ScalerEvents) -> Make:
    """For `GradScaler.unscale_`."""
    unscaling, unscaled = scene.guarded(scalers.unscaling), scene.guarded(scalers.unscaled)

    def make(original: Any) -> Callable[..., Any]:
        def unscale_(self: Any, optimizer: Any) -> Any:
            here = scene.thread
            if here.depth or not scene.is_active or not scene.is_looking:
                return original(self, optimizer)
            owner = unscaling(self, optimizer, _frame(1))
            here.depth += 1
            try:
                result = original(self, optimizer)
            finally:
                here.depth -= 1
            if owner is not None:
                unscaled(self, owner)
            return result

        return unscale_

    return make


def around_step(scene: Scene, scalers: ScalerEvents, alike: AlikeSteps) -> Make:
    """For `GradScaler.step`."""

    def make(original: Any) -> Callable[..., Any]:
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            here = scene.thread
            if here.depth or not scene.is_active:
                return original(self, optimizer, *args, **kwargs)
            owner: OptimizerState | None = None
            events: AlikeSteps | ScalerEvents = alike
            try:
                owner = None if scene.is_looking else alike.begin_step(self, optimizer)
                if owner is None:
                    owner, events = scalers.begin_step(self, optimizer, _frame(1)), scalers
            except Exception as error:
                scene.failed(error)
            here.depth += 1
            try:
                result = original(self, optimizer, *args, **kwargs)
            finally:
                here.depth -= 1
                here.stepping = None
            if owner is not None:
                try:
                    events.end_step(owner)
                except Exception as error:
                    scene.failed(error)
            return result

        return step

    return make


def around_update(scene: Scene, scalers: ScalerEvents, alike: AlikeSteps) -> Make:
    """For `GradScaler.update`."""

    def make(original: Any) -> Callable[..., Any]:
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            here = scene.thread
            if here.depth or not scene.is_active:
                return original(self, *args, **kwargs)
            here.depth += 1
            try:
                result = original(self, *args, **kwargs)
                try:
                    if scene.is_looking or not alike.updated(self):
                        scalers.updated(self, _frame(1))
                except Exception as error:
                    scene.failed(error)
            finally:
                here.depth -= 1
            return result

        return update

    return make


def around_state_dict(scene: Scene, scalers: ScalerEvents) -> Make:
    """For `GradScaler.state_dict`."""
    saving = scene.guarded(scalers.saving)

    def make(original: Any) -> Callable[..., Any]:
        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            if scene.is_active and not scene.thread.depth:
                saving(self, _frame(1))
            return original(self, *args, **kwargs)

        return state_dict

    return make


def around_optimizer_step(scene: Scene, steps: StepEvents) -> tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any, Any], None]]:
    """What is called before and after each step of each optimizer."""

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if scene.is_active:
            try:
                steps.before(optimizer, args, kwargs, _frame(1))
            except Exception as error:
                scene.failed(error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if scene.is_active:
            try:
                steps.after(optimizer)
            except Exception as error:
                scene.failed(error)

    return kept_out_of_graphs(before), kept_out_of_graphs(after)


def around_schedule(scene: Scene, aftermath: Aftermath) -> Make:
    """For the `step` of learning-rate schedulers."""
    schedule = scene.guarded(aftermath.schedule)

    def make(original: Any) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            here = scene.thread
            if here.depth or not scene.is_active:
                return original(self, *args, **kwargs)
            here.depth += 1
            try:
                result = original(self, *args, **kwargs)
            finally:
                here.depth -= 1
            schedule(self, _frame(1))
            return result

        return step

    return make


def around_clipping(scene: Scene, scalers: ScalerEvents, alike: AlikeSteps) -> Make:
    """For what clips gradients to a norm."""

    def make(original: Any) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not scene.is_active:
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            owners: list[OptimizerState] = []
            try:
                if scene.is_looking:
                    owners = scalers.clipping(listed, max_norm, total_norm, _frame(1))
                else:
                    alike.clip(listed, total_norm)
            except Exception as error:
                scene.failed(error)
            result = original(listed, max_norm, total_norm, *args, **kwargs)
            try:
                for each in owners:
                    each.note_gradients()
                if not scene.is_looking:
                    alike.clipped()
            except Exception as error:
                scene.failed(error)
            return result

        return clip

    return make


def around_total_norm(scene: Scene) -> Make:
    """For what computes the norm that gradients are clipped by."""

    def make(original: Any) -> Callable[..., Any]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                scene.thread.norm_type = float(norm_type)
            return original(tensors, norm_type, *args, **kwargs)

        return get_total_norm

    return make
