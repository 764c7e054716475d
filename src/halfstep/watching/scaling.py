"""What a loop does with its loss scalers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite, isinf
from types import FrameType
from typing import Any, Final, final

from torch import Tensor

from halfstep.watching.graphs import mark
from halfstep.watching.lines import NOWHERE, Line, line_above
from halfstep.watching.scene import Scene, current_scale
from halfstep.watching.states import OptimizerState, ScalerState
from halfstep.watching.stepping import StepEvents

__all__ = ["ScalerEvents"]

# A loop that scales what has no graph, and never updates, would keep it all.
_MOST_CONSTANTS: Final = 16


@final
class ScalerEvents:
    """What is taken in of loss scalers.

    Args:
        scene: What is known of the process.
        steps: What is taken in of optimizers.
    """

    def __init__(self, scene: Scene, steps: StepEvents) -> None:
        self._scene = scene
        self._steps = steps
        # Is called once a scaler has updated: a place at which a run can be ended or changed.
        self.at_rest: Callable[[ScalerState], None] | None = None

    def made(self, scaler: Any, frame: FrameType | None) -> None:
        """A scaler was made."""
        state = self._scene.scaler(scaler)
        if state is not None:
            state.created = line_above(frame)  # That of a subclass comes last.

    def scaled(self, scaler: Any, outputs: Any, frame: FrameType | None) -> None:
        """A scaler has scaled something."""
        state = self._scene.scaler(scaler)
        if state is None:
            return
        if state.first_use is NOWHERE:
            state.first_use = line_above(frame)
        state.scale = current_scale(scaler)
        for each in _tensors_of(outputs):
            if not mark(each, self._scene, state) and len(state.constants) < _MOST_CONSTANTS:
                state.constants.append(each)

    def unscaling(self, scaler: Any, optimizer: Any, frame: FrameType | None) -> OptimizerState | None:
        """A scaler is about to unscale gradients."""
        scene = self._scene
        if scene.thread.window is not None:
            scene.close_window()
        state, owner = scene.scaler(scaler), scene.optimizer(optimizer)
        if state is None or owner is None:
            return None
        if owner in state.unscaled or owner in state.pending:
            self._tell_missing(owner, line_above(frame), call="unscale_")
        self._check_mixing(state, owner)
        return owner

    def unscaled(self, scaler: Any, owner: OptimizerState) -> None:
        """It has."""
        state = self._scene.scaler(scaler)
        if state is not None:
            state.unscaled.append(owner)
            owner.is_unscaled = True
            owner.note_gradients()

    def begin_step(self, scaler: Any, optimizer: Any, frame: FrameType | None) -> OptimizerState | None:
        """A scaler is about to step an optimizer; returns that where it is followed."""
        scene = self._scene
        if scene.thread.window is not None:
            scene.close_window()
        state, owner = scene.scaler(scaler), scene.optimizer(optimizer)
        if state is None or owner is None:
            return None
        if not scene.is_looking:
            scene.look(True)
        if state.first_use is NOWHERE:  # What it scaled was not seen.
            state.scale = current_scale(scaler)
        owner.line = line_above(frame)
        owner.drop_replaced()
        self._check_step(state, owner, owner.line)
        owner.scaler = state
        owner.is_running, owner.found_inf = False, None
        scene.thread.stepping = owner
        return owner

    def end_step(self, owner: OptimizerState) -> None:
        """It has."""
        state, line = owner.scaler, owner.line
        if state is None or line is None:
            return
        owner.line = None
        self._steps.finish(owner, state, line, skipped=owner.is_skipped())
        state.steps += 1
        state.stepped = line
        state.pending.append(owner)

    def _check_step(self, state: ScalerState, owner: OptimizerState, line: Line) -> None:
        if owner in state.pending:
            self._tell_missing(owner, line, call="step")
        self._check_mixing(state, owner)
        if not owner.is_stepped:
            for each in owner.contributions:
                if each.scaler is None and each.is_loss and each.thread == threading.get_ident():
                    self._scene.tell(
                        "unscaled_backward",
                        each.line,
                        state=owner,
                        seen="backward() is called on a loss that is not scaled, and "
                        f"{line.file.rpartition('/')[2]}:{line.number} steps by the scaler.",
                    )
        earlier = owner.scaler
        if earlier is not None and earlier is not state and earlier.created == state.created is not NOWHERE and earlier.steps:
            self._scene.tell(
                "scaler_created_in_loop",
                state.created,
                state=owner,
                seen="A new scaler is made here for an optimizer that another one has stepped.",
            )
        self._steps.check_parameters(owner, line)

    def _check_mixing(self, state: ScalerState, owner: OptimizerState) -> None:
        if owner.is_stepped:
            return
        if any(each.scaler is state and each.update != state.updates for each in owner.contributions):
            self._scene.tell(
                "repeated_update",
                state.updated,
                state=owner,
                seen="The scaler updates between a backward pass and the step that uses its gradients.",
            )

    def _tell_missing(self, owner: OptimizerState, line: Line, *, call: str) -> None:
        self._scene.tell(
            "missing_update",
            line,
            state=owner,
            seen=f"{call} is called again for the same optimizer, with no scaler.update() since the last time.",
        )

    def updated(self, scaler: Any, frame: FrameType | None) -> None:
        """A scaler has updated."""
        scene = self._scene
        state = scene.scaler(scaler)
        if state is None:
            return
        state.updates += 1
        state.updated = line_above(frame)
        state.pending.clear()
        state.constants.clear()
        for each in state.unscaled:
            each.is_unscaled = False
        state.unscaled.clear()
        if self.at_rest is not None:
            self.at_rest(state)

    def saving(self, scaler: Any, frame: FrameType | None) -> None:
        """The state of a scaler is about to be taken."""
        state = self._scene.scaler(scaler)
        if state is not None and state.pending:
            self._scene.tell(
                "state_saved_before_update",
                line_above(frame),
                state=state.pending[0],
                seen="The scaler's state is taken after its step and before its update.",
            )

    def clipping(self, parameters: Sequence[Tensor], max_norm: Any, total_norm: Any, frame: FrameType | None) -> list[OptimizerState]:
        """Gradients are about to be clipped to a norm; returns the optimizers whose gradients they are."""
        scene = self._scene
        if scene.thread.window is not None:  # It would see the same, and not know what for.
            scene.thread.window.close()
            scene.thread.window = None
        line = line_above(frame)
        owners = [*scene.receivers([each for each in parameters if each.grad is not None])]
        for owner in owners:
            scaled = [each.scaler for each in owner.contributions if each.scaler is not None]
            is_scaled = bool(scaled) and not owner.is_unscaled and not owner.is_stepped
            owner.clips_scaled = is_scaled
            if is_scaled:
                self._tell_clipped(owner, line, scale=scaled[0].scale, max_norm=float(max_norm), total_norm=total_norm)
            owner.take_norm(len(parameters), total_norm, scale=scaled[0].scale if is_scaled else 1.0, norm_type=scene.thread.norm_type)
        return owners

    def _tell_clipped(self, owner: OptimizerState, line: Line, *, scale: float | Tensor, max_norm: float, total_norm: Any) -> None:
        rule = "scaled_norm_logged" if isinf(max_norm) else "clip_before_unscale"
        if self._scene.is_told(rule, line):
            return
        norm, scale = float(total_norm), float(scale)
        if scale <= max_norm < inf:  # The limit is multiplied with the scale as well.
            return
        instead = f": a norm of {norm:.4g} in the place of {norm / scale:.4g}" if isfinite(norm) and scale else ""
        self._scene.tell(
            rule,
            line,
            state=owner,
            seen=f"clip_grad_norm_ with a limit of {max_norm:g} sees gradients that are multiplied with {scale:,.10g}{instead}.",
        )

    def end(self) -> None:
        """The loop is not followed any longer."""
        for state in (*self._scene.retired, *self._scene.scalers.values()):
            if state.steps and not state.updates:
                self._scene.tell("missing_update", state.stepped, seen="The scaler has stepped, and never updates.")


def _tensors_of(outputs: Any) -> Iterable[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors_of(each)
