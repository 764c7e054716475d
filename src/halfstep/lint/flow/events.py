"""The parts of a training step, as they are met on one way through a function."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import final

from halfstep.lint.syntax import Function, Loop
from halfstep.lint.values import Autocast, Scaler

__all__ = ["BACKWARDS", "Event", "Guard", "Kind", "Target", "Trace"]


@final
class Kind(Enum):
    """What happens.

    Attributes:
        SCALED_BACKWARD: `scaler.scale(loss).backward()`, in one expression or by way of a variable.
        BACKWARD: `loss.backward()` of a loss that no scaler has scaled.
        UNKNOWN_BACKWARD: A backward pass of which it is not known whether its loss is scaled.
        UNSCALE: `scaler.unscale_(optimizer)`.
        CLIP: Gradients are clipped, by norm or by value.
        NORM: The size of gradients is read.
        CLEAN: Gradients are overwritten where they are not finite.
        STEP: `scaler.step(optimizer)`.
        OPTIMIZER_STEP: `optimizer.step()`.
        UPDATE: `scaler.update()`.
        ZERO_GRAD: Gradients are dropped, by an optimizer, a module, or `p.grad = None`.
        SCALE_READ: `scaler.get_scale()`.
        SCHEDULER_STEP: A learning-rate schedule moves.
        AVERAGE: An average of weights, or a target network, moves.
        ITERATION: An iteration of a loop begins; the event's node is the loop.
        LOOP_END: A loop is left; the event's node is the loop.
        LEAVE: A `continue` ends an iteration early; the event's node is the statement.
        ESCAPE: The scaler goes to code that is not in the file, which may do anything with it.
    """

    SCALED_BACKWARD = "scaled backward"
    BACKWARD = "backward"
    UNKNOWN_BACKWARD = "unknown backward"
    UNSCALE = "unscale"
    CLIP = "clip"
    NORM = "norm"
    CLEAN = "clean"
    STEP = "step"
    OPTIMIZER_STEP = "optimizer step"
    UPDATE = "update"
    ZERO_GRAD = "zero grad"
    SCALE_READ = "scale read"
    SCHEDULER_STEP = "scheduler step"
    AVERAGE = "average"
    ITERATION = "iteration"
    LOOP_END = "loop end"
    LEAVE = "leave"
    ESCAPE = "escape"


# All that differentiates.
BACKWARDS = (Kind.SCALED_BACKWARD, Kind.BACKWARD, Kind.UNKNOWN_BACKWARD)


@final
@dataclass(frozen=True, slots=True)
class Target:
    """An optimizer, or another object that is told from others by where it is kept.

    Attributes:
        identity: Equal for the same object.
        text: How it is written where it is used.
        varies: Whether it is the variable of a loop, so that each iteration has another object by the same name.
    """

    identity: Hashable
    text: str
    varies: bool = False


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that must hold for something to happen.

    Attributes:
        test: The condition.
        holds: Whether it must be true; false in an `else`.
    """

    test: ast.expr
    holds: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """One part of a training step.

    The same event object stands in all traces that pass its place in the same context.

    Attributes:
        kind: What happens.
        node: The call; the loop for `ITERATION` and `LOOP_END`; the statement for `LEAVE` and `p.grad = None`.
        scaler: The scaler that takes part.
        optimizer: The optimizer that takes part; for `SCHEDULER_STEP`, `AVERAGE` and `ZERO_GRAD` what the method is called on.
        operand: The loss of a backward pass, before scaling; the parameters that are clipped; the value that `update()` is given.
        autocast: The autocast region that is in force.
        guards: The conditions around it, from the beginning of the function where the trace begins.
        loops: The loops around it, from the beginning of the function where the trace begins.
        function: The function that it stands in; `None` for the module.
    """

    kind: Kind
    node: ast.AST
    scaler: Scaler | None = None
    optimizer: Target | None = None
    operand: ast.expr | None = None
    autocast: Autocast | None = None
    guards: tuple[Guard, ...] = ()
    loops: tuple[Loop, ...] = ()
    function: Function | None = None

    def __repr__(self) -> str:
        line = getattr(self.node, "lineno", 0)
        return f"{self.kind.name}:{line}" + (f"({self.optimizer.text})" if self.optimizer else "")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What happens on one way through a function, in order; a loop that is not left is gone through twice.

    Attributes:
        function: The function where it begins; `None` for the module's own statements.
        events: What happens.
        whole: Whether the way ends where the function does; false where it is left by an exception.
    """

    function: Function | None
    events: tuple[Event, ...]
    whole: bool = True
