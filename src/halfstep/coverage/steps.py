"""One training step under a policy, watched: its casts, and what was called in it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from halfstep._torch import Overload, before_autocast_calls
from halfstep.batch import move_batch
from halfstep.coverage.readings import decided_overloads, distinct_modules
from halfstep.engine import MixedPrecision
from halfstep.errors import HalfstepWarning
from halfstep.numerics import CastCounter
from halfstep.policy import Policy
from halfstep.randomness import RandomState, seed_everything
from halfstep.task import BatchStream, Task, TaskFactory, blamed, make_task

__all__ = ["StepCounts", "count_operations", "fresh_task", "watch_step"]


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


@contextmanager
def fresh_task(factory: TaskFactory, *, seed: int, device: torch.device) -> Iterator[Task]:
    """A task from its seed, its model on a device and in training mode; the generators of random numbers are put back at the end.

    Raises:
        TaskError: The task cannot be made, or not be moved to the device.
    """
    outside = RandomState.capture()
    try:
        seed_everything(seed)
        with blamed(f"The task could not be set up with seed {seed}"):
            task = make_task(factory, seed=seed)
            task.model.to(device=device)
            task.model.train()
        yield task
    finally:
        outside.restore()


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
        _run(task, policy, device=device, within=counter)
    return StepCounts(casts=counter.casts, elements=counter.elements, calls=tuple(calls[index] for index in range(len(modules))))


def count_operations(task: Task, policy: Policy, *, device: torch.device) -> dict[int, int]:
    """Runs the same step, and counts the calls of operations that meet autocast.

    Returns:
        For each override of an operation, by its index, how often the operation was called where autocast is on.

    Raises:
        TaskError: The task's code or an operation failed.
    """
    counts = {index: 0 for index, each in enumerate(policy.overrides) if each.kind == "op"}
    _run(task, policy, device=device, within=_counted(policy, counts, device_type=device.type))
    return counts


@contextmanager
def _counted(policy: Policy, counts: dict[int, int], *, device_type: str) -> Iterator[None]:
    def seeing(index: int) -> Callable[[], None]:
        def see() -> None:
            counts[index] += 1

        return see

    with ExitStack() as stack:
        for index in counts:
            for name in sorted(decided_overloads(policy.overrides, index)):
                stack.callback(before_autocast_calls(Overload.named(name), seeing(index), device_type=device_type))
        yield


def _run(task: Task, policy: Policy, *, device: torch.device, within: AbstractContextManager[Any]) -> None:
    # The task's own optimizer may be one that only a closure can drive, such as LBFGS. None takes a step here, so any will do.
    trained = [parameter for group in task.optimizer.param_groups for parameter in group["params"]]
    with blamed(f"A step under the policy {str(policy)!r} failed"):
        batch = move_batch(next(BatchStream(task.batches)), device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)  # That fp16 is emulated changes no count.
            engine = MixedPrecision(task.model, torch.optim.SGD(trained, lr=0.0), policy)
        try:
            with within:
                with engine.autocast():
                    loss = task.loss(task.model, batch)
                engine.backward(loss)
            engine.discard()
        finally:
            if engine.policy_handle is not None:
                engine.policy_handle.remove()


def _hook(calls: Counter[int], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        calls[index] += 1

    return hook
