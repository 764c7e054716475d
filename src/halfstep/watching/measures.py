"""The numbers of a step, read without a wait for the device."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, final
from weakref import WeakSet

import torch
from torch import Tensor

from halfstep._torch import foreach_norms
from halfstep._torch.watching import modes_are_on, without_modes
from halfstep.deferral import DeferredValues
from halfstep.records import Precision, ScalerUse, StepRecord

__all__ = ["Measures", "StepFacts", "gradient_norm", "number_of", "precision_of", "scaled_down", "total_of"]

_STATM: Final = "/proc/self/statm"

_PRECISIONS: Final[dict[torch.dtype | None, Precision]] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def precision_of(dtype: torch.dtype | None) -> Precision:
    """The precision that a dtype stands for.

    Example:
        >>> precision_of(torch.float16), precision_of(None)
        ('fp16', 'fp32')
    """
    return _PRECISIONS.get(dtype, "fp32")


def number_of(tensor: Tensor) -> float | Tensor:
    """A tensor's one element: at once on a CPU, and as a tensor that nothing writes to elsewhere; NaN where it has more than one.

    Example:
        >>> number_of(torch.tensor([0.5])), number_of(torch.ones(2))
        (0.5, nan)
    """
    if modes_are_on():  # Somebody counts operations, and ours are none of his.
        with without_modes():
            return _number_of(tensor)
    return _number_of(tensor)


def _number_of(tensor: Tensor) -> float | Tensor:
    if tensor.is_cpu:
        try:
            value = tensor.item()
        except (RuntimeError, ValueError):  # It has more than one element.
            return math.nan
        return math.nan if isinstance(value, complex) else float(value)
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        return math.nan
    return tensor.detach().clone()


def scaled_down(value: float | Tensor, scale: float | Tensor) -> float | Tensor:
    """A number that was multiplied with a scale, without it."""
    if isinstance(scale, float) and isinstance(value, float):
        return value / scale if scale else math.nan
    return value / scale


def gradient_norm(parameters: Sequence[Tensor]) -> float | Tensor | None:
    """The L2 norm of all gradients; `None` where there is none, or where they have no norm of their own, as sparse ones."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    # Those of sharded parameters lie on several ranks.
    if not gradients or any(type(each) is not Tensor for each in gradients):
        return None
    if modes_are_on():
        with without_modes():
            return _norm_of(gradients)
    return _norm_of(gradients)


def _norm_of(gradients: list[Tensor]) -> float | Tensor | None:
    try:
        norms = foreach_norms(gradients)
        if norms[0].is_cpu:
            return math.hypot(*[norm.item() for norm in norms])
        return number_of(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
    except (RuntimeError, NotImplementedError, TypeError):  # Sparse ones, or on several devices.
        return None


# What is taken down of a step when it ends; its record is made later, with those of many others. A plain tuple, since that is made in each
# step: its number, whether it was skipped, its loss scale, the losses without it, the norm of the gradients, the learning rate, the seconds
# since the end of the step before, the memory in bytes, the precision, the epoch, the name of the optimizer, and what part a loss scaler
# has in it.
StepFacts: TypeAlias = tuple[
    int,
    "bool | Tensor",
    "float | Tensor",
    "Sequence[float | Tensor]",
    "float | Tensor | None",
    "float | Tensor",
    float,
    "int | None",
    Precision,
    "int | None",
    str,
    ScalerUse,
]


@final
class Measures:
    """What is asked of the clock and the system, and the records that come of it.

    Attributes:
        ended: When the last step ended, by `time.perf_counter`.
        count: How many steps there were, less one.
    """

    # What the process holds is asked for once in so many steps, since a system call each time would be felt in a loop of small steps.
    MEMORY_EVERY: Final = 10

    def __init__(self) -> None:
        self.ended = time.perf_counter()
        self.count = -1
        self._unread: WeakSet[DeferredValues] = WeakSet()
        self._statm: int | None = None
        self._page = 0
        with suppress(OSError, ValueError, AttributeError):  # Only Linux has it.
            self._page = os.sysconf("SC_PAGE_SIZE")
            self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)

    def memory(self, parameters: Sequence[object]) -> int | None:
        """The memory in use, in bytes: of the device that parameters are on, or of the process; `None` where that is not known."""
        tensor = parameters[0] if parameters else None
        if not isinstance(tensor, Tensor):
            return None
        if tensor.is_cuda:
            return torch.cuda.max_memory_allocated(tensor.device)
        if self._statm is None or not tensor.is_cpu:
            return None
        try:
            return int(os.pread(self._statm, 128, 0).split()[1]) * self._page
        except (OSError, ValueError, IndexError):  # The process has closed its files, as daemons do.
            self._statm = None
            return None

    def record(self, facts: StepFacts) -> StepRecord:
        """The record of a step; values that lie on an accelerator are read when one of them is asked for."""
        step, skipped, scale, losses, norm, lr, seconds, memory, precision, epoch, optimizer, scaler = facts
        loss = losses[0] if len(losses) == 1 else total_of(losses)
        if type(loss) is float and type(skipped) is bool and type(scale) is float and type(lr) is float and not isinstance(norm, Tensor):
            return StepRecord(
                step=step,
                skipped=skipped,
                scale=scale,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                step_time_s=seconds,
                memory_bytes=memory,
                precision=precision,
                epoch=epoch,
                optimizer=optimizer,
                scaler=scaler,
            )
        known: dict[str, Any] = {
            "step": step,
            "skipped": skipped,
            "scale": scale,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "step_time_s": seconds,
            "memory_bytes": memory,
            "precision": precision,
            "epoch": epoch,
            "optimizer": optimizer,
            "scaler": scaler,
        }
        on_device = {name: value for name, value in known.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in known.items() if name not in on_device}
        deferred = DeferredValues(on_device, self._unread)

        def read() -> dict[str, Any]:
            numbers: dict[str, Any] = dict(deferred.read())
            if "skipped" in numbers:
                numbers["skipped"] = bool(numbers["skipped"])
            return numbers

        return StepRecord.deferred(read, **known)

    def close(self) -> None:
        """Lets go of what it asks the system by."""
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


def total_of(losses: Sequence[float | Tensor]) -> float | Tensor:
    """The sum of losses; NaN where there is none.

    Example:
        >>> total_of([0.5, 0.25]), total_of([])
        (0.75, nan)
    """
    if not losses:
        return math.nan
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    return total
