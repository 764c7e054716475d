"""One training step under a policy, watched: its casts, and what was called in it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from halfstep.batch import move_batch
from halfstep.casting import watched_operations
from halfstep.coverage.readings import decided_overloads, distinct_modules
from halfstep.engine import MixedPrecision
from halfstep.errors import HalfstepWarning
from halfstep.numerics import CastCounter
from halfstep.policy import Policy
from halfstep.scaler import LossScaler
from halfstep.task import BatchStream, Task, blamed

__all__ = ["OperationCalls", "StepCounts", "count_operations", "run_step", "watch_step"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What happened in one training step.

    Attributes:
        casts: Casts between fp32, bf16 and fp16, forward and backward.
        elements: The elements that they have written.
        calls: How often each module was called, in the order of `distinct_modules`.
    """

    casts: int
    elements: int
    calls: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCalls:
    """How often an operation that an override is about was called in one training step, where autocast is on.

    Attributes:
        met: All of these calls.
        decided: Those that the override decided about. The others were in modules that later overrides are about.
    """

    met: int
    decided: int


def watch_step(task: Task, policy: Policy, *, device: torch.device) -> StepCounts:
    """Runs the forward and the backward pass of a task's first step under a policy, and counts; no optimizer runs.

    Args:
        task: A fresh task, whose model has no policy.
        policy: One whose overrides all match.
        device: Where the model is.

    Raises:
        TaskError: The task's code or an operation failed.
    """
    modules = distinct_modules(task.model)
    calls: Counter[int] = Counter()
    counter = CastCounter()
    with ExitStack() as stack:
        for index, module in enumerate(modules):
            stack.callback(module.register_forward_hook(_hook(calls, index)).remove)
        run_step(task, policy, device=device, within=counter)
    return StepCounts(casts=counter.casts, elements=counter.elements, calls=tuple(calls[index] for index in range(len(modules))))


def count_operations(task: Task, policy: Policy, *, device: torch.device) -> dict[int, OperationCalls]:
    """Runs the same step, and counts the calls of operations that overrides are about.

    Returns:
        The calls for each of these overrides, by its index.

    Raises:
        TaskError: The task's code or an operation failed.
    """
    operations = [index for index, each in enumerate(policy.overrides) if each.kind == "op"]
    overrides = {name: index for index in operations for name in decided_overloads(policy.overrides, index)}
    met: Counter[int] = Counter()
    decided: Counter[int] = Counter()

    def see(name: str, decides: bool) -> None:  # noqa: FBT001 - as it is called
        if name in overrides:
            met[overrides[name]] += 1
            decided[overrides[name]] += decides

    run_step(task, policy, device=device, within=watched_operations(see))
    return {index: OperationCalls(met=met[index], decided=decided[index]) for index in operations}


def run_step(
    task: Task,
    policy: Policy,
    *,
    device: torch.device,
    within: AbstractContextManager[Any],
    scaler: LossScaler | None = None,
    what: str = "",
) -> tuple[Tensor, float]:
    """Runs the forward and the backward pass of a task's first step under a policy; no optimizer runs.

    Args:
        task: A fresh task, whose model has no policy.
        policy: One whose overrides all match.
        device: Where the model is.
        within: What is open around the two passes.
        scaler: The loss scaling; `None` for what the engine takes by itself.
        what: What is said to have failed, when it does.

    Returns:
        The loss, and the loss scale; 1 without loss scaling.

    Raises:
        TaskError: The task's code or an operation failed.
    """
    # The task's own optimizer may be one that only a closure can drive, such as LBFGS. None takes a step here, so any will do.
    trained = [parameter for group in task.optimizer.param_groups for parameter in group["params"]]
    with blamed(what or f"A step under the policy {str(policy)!r} failed"):
        batch = move_batch(next(BatchStream(task.batches)), device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)  # That fp16 is emulated is no news to who looks at it.
            engine = MixedPrecision(task.model, torch.optim.SGD(trained, lr=0.0), policy, scaler=scaler)
        try:
            with within:
                with engine.autocast():
                    loss = task.loss(task.model, batch)
                engine.backward(loss)
            engine.discard()
        finally:
            if engine.policy_handle is not None:
                engine.policy_handle.remove()
        return loss.detach(), 1.0 if engine.scaler is None else engine.scaler.get_scale()


def _hook(calls: Counter[int], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        calls[index] += 1

    return hook
