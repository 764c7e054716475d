"""The record of a step, whose values stay on the device until somebody reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.deferral import DeferredValues
from halfstep.engine.gradient_step import Outcome
from halfstep.records import Precision, StepRecord

__all__ = ["Recorder", "current_lr", "step_observers"]

# What is told of the record of each step of each engine of this process, and of who made it.
step_observers: list[Callable[[Recorder, StepRecord], object]] = []


def current_lr(optimizer: Optimizer) -> float | Tensor:
    """The learning rate of an optimizer's first group, as it is now; NaN when it has none.

    Example:
        >>> current_lr(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5))
        0.5
    """
    lr: float | Tensor = optimizer.param_groups[0].get("lr", math.nan)
    return lr.clone() if isinstance(lr, Tensor) else float(lr)  # A scheduler writes the next one into it.


@final
class Recorder:
    """Makes the records of an engine's steps.

    Args:
        precision: What the steps compute in.
        device: What they compute on.
    """

    def __init__(self, *, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._unread: WeakSet[DeferredValues] = WeakSet()

    def record(self, outcome: Outcome, *, step: int, loss: Tensor, lr: float | Tensor, started: float) -> StepRecord:
        """The record of a step that has just ended.

        Args:
            outcome: What became of it.
            step: Its number.
            loss: Its loss, unscaled and detached.
            lr: Its learning rate.
            started: When it began, by `time.perf_counter`.
        """
        record = self._record(outcome, step=step, loss=loss, lr=lr, started=started)
        for tell in step_observers:
            tell(self, record)
        return record

    def _record(self, outcome: Outcome, *, step: int, loss: Tensor, lr: float | Tensor, started: float) -> StepRecord:
        on_cuda = self._device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self._device) if on_cuda else None
        seconds = time.perf_counter() - started
        if outcome.skipped is not None and self._device.type == "cpu":  # Nothing is left to wait for.
            norm = outcome.norm
            return StepRecord(
                step=step,
                skipped=outcome.skipped,
                scale=float(outcome.scale),
                loss=loss.item(),
                grad_norm=None if norm is None else norm.item(),
                lr=float(lr),
                step_time_s=seconds,
                memory_bytes=memory,
                precision=self._precision,
            )
        # With CUDA graphs, the next step writes into the memory of this one's loss.
        on_device: dict[str, Tensor] = {"loss": loss.clone() if on_cuda else loss}
        known: dict[str, Any] = {"step": step, "precision": self._precision, "step_time_s": seconds, "memory_bytes": memory}
        for name, value in (
            ("scale", outcome.scale),
            ("grad_norm", outcome.norm),
            ("lr", lr),
            ("skipped", outcome.found_inf if outcome.skipped is None else outcome.skipped),
        ):
            if isinstance(value, Tensor):
                on_device[name] = value
            else:
                known[name] = value
        deferred = DeferredValues(on_device, self._unread)

        def read() -> Mapping[str, Any]:
            numbers: dict[str, Any] = dict(deferred.read())
            if "skipped" in numbers:
                numbers["skipped"] = bool(numbers["skipped"])
            return numbers

        return StepRecord.deferred(read, **known)
