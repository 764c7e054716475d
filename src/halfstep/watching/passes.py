"""Backward passes: whose loss it is, and which optimizers' gradients it adds to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import is_in_backward
from halfstep.watching.graphs import casts_values, find_mark, has_factor
from halfstep.watching.lines import Line, line_above
from halfstep.watching.measures import number_of, scaled_down
from halfstep.watching.misuse import FP16_UNSCALED
from halfstep.watching.scene import Scene
from halfstep.watching.states import Contribution, OptimizerState, RegionState, ScalerState, parameters_of
from halfstep.watching.windows import GradientWindow

__all__ = ["BackwardEvents"]

# What a loop does with scaled gradients is looked at after its first backward passes, and then after each whose number is a power of two.
_FIRST: Final = 3

_AUTOCAST: Final = frozenset({"cpu", "cuda"})

# A loop that never zeroes its gradients would add to the list for ever.
_MOST_CONTRIBUTIONS: Final = 10_000


@final
class BackwardEvents:
    """What is taken in of backward passes.

    Args:
        scene: What is known of the process.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def run(
        self, original: Callable[..., Any], tensors: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Runs a backward pass, and takes in what it does."""
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None) if isinstance(tensors, list | tuple) else None
        if not isinstance(root, Tensor) or is_in_backward():  # Activation checkpointing runs one inside of another.
            return original(tensors, *arguments, **keywords)
        if self._scene.thread.window is not None:
            self._scene.close_window()
        contribution = self._contribution(root, line_above(frame))
        looks = self._look(contribution)
        result = original(tensors, *arguments, **keywords)
        for state, before in looks:
            if state.is_reached(before):
                self._add(contribution, state)
        return result

    def _contribution(self, root: Tensor, line: Line) -> Contribution:
        """What a backward pass of a loss adds, to whatever it reaches."""
        scene, device = self._scene, root.device.type
        scaler = self._scaler_of(root)
        region = self._region_of(device, line)
        if device in _AUTOCAST and torch.is_autocast_enabled(device):
            self._check_inside(device, line)
        dtype = None if region is None else region.dtype
        if scaler is not None and dtype is torch.bfloat16:
            scene.places["scaler_with_bf16"] = scaler.place
        is_half = scaler is None and region is not None and dtype is torch.float16 and casts_values(root)
        if is_half and region is not None and not scene.optimizers and not scene.scalers:  # Otherwise a step tells.
            scene.tell("fp16_without_scaler", region.line, seen=FP16_UNSCALED)
        return Contribution(
            line=line,
            scaler=scaler,
            update=0 if scaler is None else scaler.updates,
            region=region,
            thread=threading.get_ident(),
            is_half=is_half,
            loss=number_of(root) if scaler is None else scaled_down(number_of(root), scaler.scale),
        )

    def _look(self, contribution: Contribution) -> list[tuple[OptimizerState, list[Tensor | None]]]:
        """The optimizers that a backward pass may reach, and their gradients before it."""
        looks = []
        for state in self._scene.free_optimizers():
            if state.thread not in {0, contribution.thread}:
                continue
            state.refresh()
            fresh, before = state.look()
            if fresh or state.is_stepped:
                state.contributions.clear()
            else:
                self._check_mixing(state)
            looks.append((state, before))
        return looks

    def _add(self, contribution: Contribution, state: OptimizerState) -> None:
        if state.is_stepped:
            state.contributions.clear()
            state.is_stepped = False
        if len(state.contributions) < _MOST_CONTRIBUTIONS:
            state.contributions.append(contribution)
        if contribution.scaler is not None and self._scene.thread.window is None:
            self._open_window(state, contribution.scaler)

    def _scaler_of(self, root: Tensor) -> ScalerState | None:
        """The scaler that a loss was scaled by."""
        scalers = self._scene.scalers
        if not scalers:
            return None
        found: ScalerState | None = find_mark(root, self._scene)
        if found is None:
            found = next((each for each in scalers.values() if each.constants and has_factor(root, each.constants)), None)
        return found

    def _region_of(self, device: str, line: Line) -> RegionState | None:
        """The autocast region that the loss was computed in, if that acts on its device."""
        region = self._scene.training_region()
        if region is None:
            return None
        if region.device_type == device:
            return region
        self._scene.tell(
            "autocast_device_mismatch",
            region.line,
            seen=f"The region is autocast({region.device_type!r}), but the loss is computed on {device!r} "
            f"(backward is called at {line.file.rpartition('/')[2]}:{line.number}).",
        )
        return None

    def _check_inside(self, device: str, line: Line) -> None:
        regions = [each for each in self._scene.thread.regions if each.dtype is not None and each.device_type == device]
        if all(each.line.is_direct for each in regions[-1:]):
            self._scene.tell("backward_in_autocast", line, seen="backward() is called inside of an autocast region.")

    def _check_mixing(self, state: OptimizerState) -> None:
        """Gradients are about to be added to others."""
        for each in state.contributions:
            if each.scaler is not None and each.update != each.scaler.updates and each.thread == threading.get_ident():
                self._scene.tell(
                    "repeated_update",
                    each.scaler.updated,
                    state=state,
                    seen="The scaler updates between backward passes whose gradients are added up before one step.",
                )

    def _open_window(self, state: OptimizerState, scaler: ScalerState) -> None:
        scaler.iterations += 1
        count = scaler.iterations
        if count > _FIRST and count & (count - 1):
            return
        gradients = [each.grad for each in parameters_of(state.optimizer()) if each.grad is not None]
        scale = scaler.scale
        self._scene.thread.window = window = GradientWindow(
            state, gradients, scale=f"the loss scale of {scale:g}" if isinstance(scale, float) else "the loss scale"
        )
        window.open()
