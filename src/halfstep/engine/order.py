"""Which call of an engine belongs where in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from halfstep.errors import StepOrderError

__all__ = ["check_backward", "check_complete", "check_idle", "lookahead"]

Batch = TypeVar("Batch")


class Counted(Protocol):
    """A step in progress.

    Attributes:
        micro_batches: How many it has seen.
        accumulate: How many belong to it.
        unscaled: Whether its gradients are unscaled.
        ends_early: Whether it ends with the micro-batch that is under way.
        goes_on: Whether a checkpoint has brought back the micro-batches that it has seen.
    """

    micro_batches: int
    accumulate: int
    unscaled: bool
    ends_early: bool
    goes_on: bool

    @property
    def is_complete(self) -> bool:
        """Whether no micro-batch is missing."""


def check_backward(step: Counted, *, computes_again: bool, retries: int) -> None:
    """Accepts a call of `backward`.

    Args:
        step: The step in progress.
        computes_again: Whether gradients are computed several times in one step.
        retries: How often a skipped step is tried again.

    Raises:
        StepOrderError: They are, or all micro-batches were seen, or gradients are unscaled.
    """
    if computes_again:
        why = f"retries={retries}" if retries else "an optimizer that takes a closure,"
        raise StepOrderError(f"With {why} the engine computes gradients several times in one step: use train_step(fn, *batch).")
    if step.micro_batches == step.accumulate:
        raise StepOrderError(
            f"backward() was called {step.accumulate + 1} times without step(), but accumulate={step.accumulate}. "
            "Call step() after each backward(); it returns None until the last micro-batch of a step."
        )
    if step.unscaled:
        raise StepOrderError("backward() was called after unscale_gradients(), when gradients are no longer scaled. Call step() first.")


def check_complete(step: Counted, call: str) -> None:
    """Accepts a call that belongs after the last micro-batch of a step.

    Raises:
        StepOrderError: Others are to come.
    """
    if not step.is_complete:
        raise StepOrderError(
            f"{call} was called after {step.micro_batches} of accumulate={step.accumulate} micro-batches; the others would add "
            "scaled gradients. Call it after the last backward() of a step."
        )


def check_idle(step: Counted, call: str) -> None:
    """Accepts a call that belongs between two steps.

    Raises:
        StepOrderError: A step is in progress.
    """
    if step.micro_batches:
        raise StepOrderError(
            f"{call} was called after {step.micro_batches} of accumulate={step.accumulate} micro-batches, whose gradients would be "
            "lost. Call it after a step, end this one with flush(), or give it up with discard()."
        )


def lookahead(step: Counted, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Passes batches on, and lets the step know when the last one is under way.

    Raises:
        StepOrderError: A step is in progress that did not begin with batches like these.
    """
    if not step.goes_on:
        check_idle(step, "micro_batches()")
    try:
        upcoming = next(batches)
    except StopIteration:
        return
    try:
        for following in batches:
            yield upcoming
            upcoming = following
        step.ends_early = True
        yield upcoming
    finally:
        step.ends_early = False
