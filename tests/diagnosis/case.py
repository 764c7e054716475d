"""What a case is: a small training task, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import Task
from halfstep.records import UNKNOWN, Cause, Precision
from halfstep.task import TaskFactory

__all__ = ["DEFAULT_SGD", "NOWHERE", "SLOW_SGD", "Batches", "Case", "Loss", "OptimizerOf", "marked_line", "training"]

# The module of an operation that belongs to none, such as one that the loss function calls after the model has returned.
NOWHERE = UNKNOWN

Loss = Callable[[Any, Any], Tensor]
Batches = Callable[[], list[Any]]
OptimizerOf = Callable[..., Optimizer]

DEFAULT_SGD: OptimizerOf = partial(torch.optim.SGD, lr=1e-3)
# Where gradients are large, and a step as long as elsewhere would end the training.
SLOW_SGD: OptimizerOf = partial(torch.optim.SGD, lr=1e-12)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training task, how it is diagnosed, and the right answer.

    Attributes:
        name: What it is about.
        task: The factory of the task.
        cause: What a diagnosis must name.
        op: The operation that it must name, with its overload; `None` where that is not compared.
        module: Where that operation is; `None` where that is not compared.
        marker: A comment that ends the line that it must name; `None` where that is not compared.
        verified: Whether a remedy must hold; `None` where that is not compared.
        precision: What is diagnosed.
        target: The device type that is rehearsed; `None` for the CPU's own autocast.
        loss_scale: `dynamic`, or a scale that never moves.
        max_steps: How many steps to look at.
    """

    name: str
    task: TaskFactory
    cause: Cause
    op: str | None = None
    module: str | None = None
    marker: str | None = None
    verified: bool | None = None
    precision: Precision = "fp16"
    target: str | None = "cuda"
    loss_scale: float | Literal["dynamic", "none"] = "dynamic"
    max_steps: int = 2

    def __str__(self) -> str:
        return f"{self.cause}: {self.name}"


def training(model: Callable[[], nn.Module], loss: Loss, batches: Batches, *, optimizer: OptimizerOf = DEFAULT_SGD) -> TaskFactory:
    """The factory of a task whose weights and batches are fixed by its seed."""

    def task(seed: int) -> Task:
        torch.manual_seed(seed)
        made = model()
        return Task(model=made, optimizer=optimizer(made.parameters()), loss=loss, batches=batches())

    return task


def marked_line(marker: str) -> tuple[str, int]:
    """The file and the number of the one line that ends with a comment, among the modules beside this one."""
    files = sorted(Path(__file__).parent.glob("cases_*.py"))
    found = [
        (file.name, number)
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1)
        if line.endswith(f"# {marker}")
    ]
    assert len(found) == 1, (marker, found)
    return found[0]
