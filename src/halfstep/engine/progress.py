"""The step that an engine is in the middle of, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from halfstep.engine.state import engine_state

if TYPE_CHECKING:
    from halfstep.engine.mixed_precision import MixedPrecision

__all__ = ["StepProgress", "go_on_from", "micro_batches_of", "progress_of", "state_of", "trained_parameters"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no single truth value to compare by
class StepProgress:
    """What has been computed for a step that is not at its end.

    Attributes:
        micro_batches: How many it has seen.
        loss: The sum of their losses, unscaled, each divided by the number of micro-batches in a step; `None` before the first.
        gradients: The gradients so far, scaled, by the names that the model gives its parameters.
        is_held: Whether the gradients were not reduced over the ranks yet.
        held_back: Those that `fully_shard` has not spread over the ranks yet, by the same names, each whole.
        began: Whether the engine saw its first forward pass begin, so that a skip puts back every buffer.
        buffers: What the buffers were before the step, by the names that the model gives them, without those that it cannot have changed.
    """

    micro_batches: int
    loss: Tensor | None
    gradients: Mapping[str, Tensor]
    is_held: bool
    held_back: Mapping[str, Tensor]
    began: bool
    buffers: Mapping[str, Tensor]


def progress_of(engine: MixedPrecision) -> StepProgress | None:
    """What an engine has computed for the step in progress so far; `None` between two steps.

    Its tensors are the engine's own: copy them before the next micro-batch.

    Raises:
        StepOrderError: The gradients are unscaled already, or an engine that shares the scaler has stepped and another has not.
    """
    return engine.driver.progress()


def trained_parameters(engine: MixedPrecision) -> dict[str, nn.Parameter]:
    """What an engine's optimizers train, by the names that the model gives it; what is none of the model's has its place for a name."""
    return engine.driver.parameters()


def micro_batches_of(engine: MixedPrecision) -> int:
    """How many micro-batches of the step in progress an engine has seen; 0 between two steps."""
    return engine.driver.micro_batches


def state_of(engine: MixedPrecision) -> dict[str, Any]:
    """What `MixedPrecision.state_dict()` returns, in the middle of a step, too: of use together with the progress of that step."""
    return engine_state(precision=engine.precision, steps=engine.driver.steps, scaler=engine.scaler, checker=engine.checker)


def go_on_from(progress: StepProgress | None, *, engine: MixedPrecision) -> None:
    """Has an engine go on from the values that its model has now: the last part of loading a state.

    Args:
        progress: What had been computed for the step in progress; `None` between two steps. The engine takes its tensors over.
        engine: The engine, between two steps.
    """
    engine.driver.go_on(progress)
