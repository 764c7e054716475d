"""What follows from a skipped step: schedules that move all the same, buffers that it leaves broken."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, final
from weakref import ref

from halfstep.records import StepRecord
from halfstep.watching.lines import Line, line_above
from halfstep.watching.modules import model_of, nonfinite_buffers
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, parameters_of

__all__ = ["Aftermath"]

# A schedule that another library moves is told of once it is so many steps ahead; a loop of one's own is told at once.
_TOLERATED_AHEAD: Final = 5

# Buffers are looked at after the first skips, and then after each whose number is a power of two.
_FIRST_SKIPS: Final = 3


@final
class Aftermath:
    """What is taken in of skipped steps.

    Args:
        scene: What is known of the process.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._moves: list[tuple[OptimizerState, int, int, Line]] = []

    def schedule(self, scheduler: Any, frame: FrameType | None) -> None:
        """A learning-rate scheduler moves."""
        optimizer = getattr(scheduler, "optimizer", None)
        state = self._scene.optimizers.get(id(optimizer))
        if state is None:
            return
        before = state.schedules.get(id(scheduler), 0)
        state.schedules[id(scheduler)] = state.steps
        if state.steps - before == 1 and state.scaler is not None and state.last_skipped is not False:
            move = (state, state.steps, id(scheduler), line_above(frame))
            if state.last_skipped is True:
                self._check_move(*move)
            else:  # Only the device knows.
                self._moves.append(move)

    def settle(self, steps: Sequence[tuple[OptimizerState | None, StepRecord, Line]]) -> None:
        """Looks at what steps came to that only a device knew, once their records may be read.

        Args:
            steps: Each with its optimizer, its record and its line.
        """
        unknown = {(id(owner), record.step): record for owner, record, _ in steps if owner is not None and owner.is_deferred}
        moves, self._moves = self._moves, []
        for move in moves:
            record = unknown.get((id(move[0]), move[1]))
            if record is not None and record.skipped:
                self._check_move(*move)
        for owner, record, line in steps:
            if owner is not None and owner.is_deferred and record.skipped:
                self.check_buffers(owner, record.step, line)

    def _check_move(self, state: OptimizerState, step: int, scheduler: int, line: Line) -> None:
        """A schedule has moved with a step that was skipped."""
        ahead = state.ahead[scheduler] = state.ahead.get(scheduler, 0) + 1
        if line.is_direct or ahead >= _TOLERATED_AHEAD:
            self._scene.tell("schedule_moved_on_skip", line, at=step, seen=f"The schedule moves although step {step} was skipped.")

    def check_buffers(self, state: OptimizerState, step: int, line: Line) -> None:
        """A step was skipped: its forward pass may have left running statistics that are not finite."""
        state.skips += 1
        if (state.skips & (state.skips - 1) and state.skips > _FIRST_SKIPS) or self._scene.is_told("nonfinite_buffers", line):
            return
        model = None if state.model is None else state.model()
        if model is None:
            model = model_of(parameters_of(state.optimizer()))
            state.model = None if model is None else ref(model)
        for path, name in () if model is None else nonfinite_buffers(model):
            self._scene.tell(
                "nonfinite_buffers",
                line,
                at=step,
                module=path,
                seen=f"Step {step} was skipped, and the buffer {path + '.' if path else ''}{name} is not finite.",
            )
            return
