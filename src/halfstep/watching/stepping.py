"""Optimizer steps: how they come about, and the record of each."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any, final

from torch import Tensor

from halfstep.engine import Recorder
from halfstep.records import StepRecord
from halfstep.watching.alike import AlikeSteps
from halfstep.watching.lines import NOWHERE, Line, line_above
from halfstep.watching.measures import number_of, precision_of
from halfstep.watching.misuse import FP16_UNSCALED
from halfstep.watching.modules import live_modules, orphans, strays
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, ScalerState, parameters_of

__all__ = ["StepEvents"]


@final
class StepEvents:
    """What is taken in of optimizers.

    Args:
        scene: What is known of the process.
        alike: What is taken in of each step, also of those that are not looked at.
    """

    def __init__(self, scene: Scene, alike: AlikeSteps) -> None:
        self._scene = scene
        self._alike = alike

    def made(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self._scene.optimizer(optimizer)

    def before(self, optimizer: Any, arguments: Any, keywords: Any, frame: FrameType | None) -> None:
        """An optimizer is about to step, by its scaler or by itself."""
        scene = self._scene
        stepping = scene.thread.stepping
        if stepping is not None:
            stepping.is_running = True
            own = vars(optimizer)
            if "found_inf" in own:  # It decides by itself.
                stepping.found_inf = own["found_inf"]
            scale = own.get("grad_scale")
            stepping.measure(scale=number_of(scale) if isinstance(scale, Tensor) and stepping.norm is None else 1.0)
            return
        if not scene.is_looking:
            state = scene.last
            if state is not None and state.optimizer() is optimizer:
                state.line = state.last_line
                state.measure(scale=1.0)
                return
            scene.look(True)
        self._look_before(optimizer, line_above(frame), has_closure=bool(arguments[1:] or keywords))

    def _look_before(self, optimizer: Any, line: Line, *, has_closure: bool) -> None:
        if self._scene.thread.window is not None:
            self._scene.close_window()
        state = self._scene.optimizer(optimizer)
        if state is not None:
            state.line = line
            state.drop_replaced()
            if not has_closure:  # Which computes the gradients that count.
                self._check_direct(state, line)
            self.check_parameters(state, line)
            state.measure(scale=1.0)

    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        scene = self._scene
        if scene.thread.stepping is not None:
            return
        state = scene.optimizers.get(id(optimizer))
        if state is None or state.line is None:
            return
        line, state.line = state.line, None
        if scene.is_looking:
            self.finish(state, None, line, skipped=False)
        else:
            self._alike.finish(state, skipped=False, scale=1.0, losses=(scene.losses or scene.others).copy())

    def _check_direct(self, state: OptimizerState, line: Line) -> None:
        """A loop calls an optimizer's step itself."""
        scene = self._scene
        if any(each.scaler is not None for each in state.contributions):
            how = "after scaler.step" if state.is_stepped else "on the gradients of a scaled loss"
            scene.tell(
                "optimizer_step_bypasses_scaler",
                line,
                state=state,
                seen=f"{type(state.optimizer()).__name__}.step() is called directly {how}.",
            )
        elif scene.unused_scaler() is None:
            for each in state.contributions:
                if each.is_half and each.region is not None:
                    scene.tell("fp16_without_scaler", each.region.line, state=state, seen=FP16_UNSCALED)

    def check_parameters(self, state: OptimizerState, line: Line) -> None:
        """Looks, now and then, for parameters that the model does not have any longer."""
        state.looks += 1
        if state.looks & (state.looks - 1) and state.looks != 3:
            return
        parameters = parameters_of(state.optimizer())
        state.refresh()
        missing = [each for each in parameters if each.requires_grad and each.grad is None]
        if not state.contributions and 0 < len(missing) < len(parameters):
            state.choose_reached()
        if not missing or len(missing) == state.missing or self._scene.is_told("stale_parameters", line):
            return
        state.missing = len(missing)
        modules = live_modules()
        lost = missing if len(missing) == len(parameters) else strays(missing, modules)
        others = [*orphans((each for one in self._scene.optimizers.values() for each in self._identities(one)), modules)] if lost else []
        if others:
            self._scene.tell(
                "stale_parameters",
                line,
                state=state,
                seen=f"{len(lost)} of the optimizer's {len(parameters)} parameters get no gradients, since the model does not have them, "
                f"and {len(others)} that do are in no optimizer ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}).",
            )

    def _identities(self, state: OptimizerState) -> frozenset[int]:
        state.refresh()
        return state.identities

    def finish(self, state: OptimizerState, scaler: ScalerState | None, line: Line, *, skipped: bool | Tensor) -> None:
        """A step that was looked at has ended."""
        if state.steps == 0:
            state.name = self._scene.name(state)
        self._look_at(state, scaler)
        state.is_stepped, state.last_line = True, line
        self._alike.finish(
            state,
            skipped,
            1.0 if scaler is None else scaler.scale,
            [each.loss for each in state.contributions] or self._scene.losses.copy(),
        )

    def _look_at(self, state: OptimizerState, scaler: ScalerState | None) -> None:
        """Takes in what the steps of an optimizer are like."""
        scene = self._scene
        state.thread = threading.get_ident()
        first = next(iter(parameters_of(state.optimizer())), None)
        regions = [each.dtype for each in state.contributions if each.dtype is not None]
        state.precision = precision_of(regions[0] if regions else None if first is None else first.dtype)
        state.was_scaled = scaler is not None or any(each.scaler is not None for each in state.contributions)
        unused = None if state.was_scaled else scene.unused_scaler()
        state.use = "used" if state.was_scaled else "none" if unused is None else "unused"
        if unused is not None:
            scene.places["scaler_unused"] = unused.created
        for each in scene.thread.regions:
            each.steps += each.dtype is not None and each.keeps_casts
            if each.steps == 2 and each.line.is_direct:
                scene.tell(
                    "loop_inside_autocast", each.line, state=state, seen="Several optimizer steps are taken inside of this autocast region."
                )

    def observe_engine(self, engine: Recorder, record: StepRecord) -> None:
        """An engine of halfstep's has made a step."""
        if self._scene.is_active:
            self._scene.observe(None, record, NOWHERE)
