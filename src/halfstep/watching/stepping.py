"""Optimizer steps: how they come about, and the record of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, final
from weakref import ref

import torch
from torch import Tensor

from halfstep.engine import Recorder
from halfstep.records import ScalerUse, StepRecord
from halfstep.watching.lines import Line, line_above
from halfstep.watching.measures import gradient_norm, number_of, precision_of, scaled_down
from halfstep.watching.modules import live_modules, model_of, nonfinite_buffers, orphans, strays
from halfstep.watching.scene import Scene
from halfstep.watching.states import OptimizerState, ScalerState, parameters_of

__all__ = ["StepEvents"]

# A schedule that another library moves is told of once it is so many steps ahead; a loop of one's own is told at once.
_TOLERATED_AHEAD: Final = 5

# A norm that a loop does not need itself is a pass over all gradients; in the first steps there is one each time.
_NORM_EVERY: Final = 10

# Buffers are looked at after the first skips, and then after each whose number is a power of two.
_FIRST_SKIPS: Final = 3


@final
class StepEvents:
    """What is taken in of optimizers.

    Args:
        scene: What is known of the process.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._moves: list[tuple[OptimizerState, StepRecord, int, Line]] = []

    def made(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self._scene.optimizer(optimizer)

    def before(self, optimizer: Any, frame: FrameType | None) -> None:
        """An optimizer is about to step."""
        scene = self._scene
        stepping = scene.thread.stepping
        if stepping is not None:
            stepping.is_running = True
            found = getattr(optimizer, "found_inf", None)
            stepping.found_inf = found if isinstance(found, Tensor) else None
            self._measure(stepping, getattr(optimizer, "grad_scale", None))
            return
        if scene.thread.window is not None:
            scene.close_window()
        state = scene.optimizer(optimizer)
        if state is None:
            return
        state.line = line = line_above(frame)
        self._check_direct(state, line)
        self.check_parameters(state, line)
        self._measure(state, None)

    def after(self, optimizer: Any) -> None:
        """It has stepped."""
        scene = self._scene
        if scene.thread.stepping is not None:
            return
        state = scene.optimizer(optimizer)
        if state is not None and state.line is not None:
            line, state.line = state.line, None
            self._finish(state, None, line, skipped=False)

    def run_scaled(self, scaler: ScalerState, state: OptimizerState, line: Line, run: Callable[[], Any]) -> Any:
        """Runs the step of an optimizer by its scaler."""
        here = self._scene.thread
        here.stepping, state.is_running = state, False
        state.found_inf = None
        try:
            result = run()
        finally:
            here.stepping = None
        self._finish(state, scaler, line, skipped=_is_skipped(state))
        return result

    def _measure(self, state: OptimizerState, grad_scale: Any) -> None:
        """Computes the norm of the gradients now and then, unless the loop has done so."""
        if state.norm is None and (state.steps < _NORM_EVERY or state.steps % _NORM_EVERY == 0):
            norm = gradient_norm(parameters_of(state.optimizer()))
            state.norm = norm if norm is None or not isinstance(grad_scale, Tensor) else scaled_down(norm, number_of(grad_scale))

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
                    scene.tell(
                        "fp16_without_scaler",
                        each.region.line,
                        state=state,
                        seen="The forward pass computes in fp16, and its loss is not scaled.",
                    )

    def check_parameters(self, state: OptimizerState, line: Line) -> None:
        """Looks, now and then, for parameters that the model does not have any longer."""
        count = state.steps + 1
        if count & (count - 1) and count != 3:
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

    def _finish(self, state: OptimizerState, scaler: ScalerState | None, line: Line, *, skipped: bool | Tensor) -> None:
        scene = self._scene
        optimizer: Any = state.optimizer()
        if state.steps == 0:
            state.name = scene.name(state)
        state.steps += 1
        state.thread = threading.get_ident()
        scene.steps += 1
        group = optimizer.param_groups[0] if getattr(optimizer, "param_groups", None) else {}
        lr = group.get("lr", float("nan"))
        first = next(iter(group.get("params", ())), None)
        dtype = first.dtype if isinstance(first, Tensor) else None
        regions = [each.region.dtype for each in state.contributions if each.region is not None and each.region.dtype is not None]
        use: ScalerUse = "used" if scaler is not None or any(each.scaler is not None for each in state.contributions) else "none"
        if use == "none" and (unused := scene.unused_scaler()) is not None:
            use, scene.places["scaler_unused"] = "unused", unused.created
        record = scene.measures.record(
            step=state.steps,
            skipped=skipped,
            scale=1.0 if scaler is None else scaler.scale,
            losses=[each.loss for each in state.contributions],
            norm=None if skipped is True else state.norm,
            lr=number_of(lr) if isinstance(lr, Tensor) else float(lr),
            precision=precision_of(regions[0] if regions else dtype),
            epoch=scene.epoch,
            optimizer=state.name,
            scaler=use,
            device=first.device if isinstance(first, Tensor) else torch.device("cpu"),
        )
        for each in scene.thread.regions:
            each.steps += each.dtype is not None and each.keeps_casts
            if each.steps == 2 and each.line.is_direct:
                scene.tell(
                    "loop_inside_autocast", each.line, state=state, seen="Several optimizer steps are taken inside of this autocast region."
                )
        state.is_stepped, state.norm, state.last = True, None, record
        state.is_known = isinstance(skipped, bool)
        scene.observe(state, record, line)
        if skipped is True:
            self._check_buffers(state, record, line)

    def observe_engine(self, engine: Recorder, record: StepRecord) -> None:
        """An engine of halfstep's has made a step."""
        if self._scene.is_active:
            self._scene.observe(None, record, Line("", 0, is_direct=False))

    def schedule(self, scheduler: Any, frame: FrameType | None) -> None:
        """A learning-rate scheduler moves."""
        optimizer = getattr(scheduler, "optimizer", None)
        state = self._scene.optimizers.get(id(optimizer))
        if state is None:
            return
        before = state.schedules.get(id(scheduler), 0)
        state.schedules[id(scheduler)] = state.steps
        if state.steps - before == 1 and state.last is not None and state.scaler is not None:
            move = (state, state.last, id(scheduler), line_above(frame))
            if state.is_known:
                self._check_move(*move)
            else:
                self._moves.append(move)

    def settle(self, steps: Sequence[tuple[OptimizerState | None, StepRecord, Line]]) -> None:
        """Looks at what steps came to, once their records may be read.

        Args:
            steps: Each with its optimizer, its record and its line.
        """
        moves, self._moves = self._moves, []
        for move in moves:
            self._check_move(*move)
        for owner, record, line in steps:
            if owner is not None and not owner.is_known and record.skipped:
                self._check_buffers(owner, record, line)

    def _check_move(self, state: OptimizerState, record: StepRecord, scheduler: int, line: Line) -> None:
        if not record.skipped:
            return
        ahead = state.ahead[scheduler] = state.ahead.get(scheduler, 0) + 1
        if line.is_direct or ahead >= _TOLERATED_AHEAD:
            self._scene.tell(
                "schedule_moved_on_skip", line, at=record.step, seen=f"The schedule moves although step {record.step} was skipped."
            )

    def _check_buffers(self, state: OptimizerState, record: StepRecord, line: Line) -> None:
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
                at=record.step,
                module=path,
                seen=f"Step {record.step} was skipped, and the buffer {path + '.' if path else ''}{name} is not finite.",
            )
            return


def _is_skipped(state: OptimizerState) -> bool | Tensor:
    """Whether the step that a scaler was asked for was not taken; a tensor where only the device knows."""
    if state.found_inf is None:
        return not state.is_running
    found = number_of(state.found_inf)
    return bool(found) if isinstance(found, float) else found
