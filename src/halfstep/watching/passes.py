"""Backward passes: whose loss it is, and which optimizers' gradients it adds to."""

from __future__ import annotations

import threading
from math import nan
from types import FrameType
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from halfstep._torch import is_in_backward
from halfstep._torch.watching import compiler_is_in_use, modes_are_on
from halfstep.watching.graphs import cast_dtype, find_mark, has_factor
from halfstep.watching.lines import Line, line_above
from halfstep.watching.measures import number_of, scaled_down, total_of
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


# A backward pass that runs: what it adds, and the optimizers that it may reach, with their gradients before it.
_Pass: TypeAlias = "tuple[Contribution, list[tuple[OptimizerState, list[Tensor | None]]]]"


@final
class BackwardEvents:
    """What is taken in of backward passes.

    Args:
        scene: What is known of the process.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def begin(self, tensors: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], frame: FrameType | None) -> _Pass | None:
        """A backward pass is about to run; returns what `end` is to be given, `None` for nothing."""
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors] if isinstance(tensors, list | tuple) else []
        # Activation checkpointing runs one inside of another.
        if not roots or not all(isinstance(each, Tensor) for each in roots) or is_in_backward():
            return None
        if self._scene.thread.window is not None:
            self._scene.close_window()
        given = arguments[0] if arguments else keywords.get("grad_tensors")
        contribution = self._contribution(roots, line_above(frame), is_loss=given is None)
        return contribution, self._look(contribution)

    def end(self, begun: _Pass) -> None:
        """It has run."""
        contribution, looks = begun
        reached = [state for state, before in looks if state.is_reached(before)]
        for state in reached:
            self._add(contribution, state)
        if not reached and len(self._scene.losses) < _MOST_CONTRIBUTIONS:  # It may be the loss of parameters that nobody looks at.
            self._scene.losses.append(contribution.loss)

    def _contribution(self, roots: list[Tensor], line: Line, *, is_loss: bool) -> Contribution:
        """What a backward pass adds, to whatever it reaches.

        Args:
            roots: What it begins at.
            line: Where it is called.
            is_loss: Whether it begins with a loss, and not with gradients that come from elsewhere, which may be scaled.
        """
        scene, root = self._scene, roots[0]
        device = root.device.type
        scalers = [self._scaler_of(each) for each in roots]
        scaler = None if is_loss and None in scalers else next((each for each in scalers if each is not None), None)
        region = self._region_of(device, line)
        if device in _AUTOCAST and torch.is_autocast_enabled(device):
            self._check_inside(device, line)
        dtype = None if region is None else region.dtype
        if scene.thread.is_mixed and dtype is not None:  # Regions of several kinds were entered: the graph tells which.
            dtype = cast_dtype(root)
        if scaler is not None and dtype is torch.bfloat16:
            scene.places["scaler_with_bf16"] = scaler.place
        is_half = scaler is None and is_loss and dtype is torch.float16 and cast_dtype(root) is torch.float16
        if is_half and region is not None and not scene.optimizers and not scene.scalers:  # Otherwise a step tells.
            scene.tell("fp16_without_scaler", region.line, seen=FP16_UNSCALED)
        losses = [
            number_of(each) if by is None else scaled_down(number_of(each), by.scale) for each, by in zip(roots, scalers, strict=True)
        ]
        return Contribution(
            line=line,
            scaler=scaler,
            update=0 if scaler is None else scaler.updates,
            region=region,
            dtype=dtype,
            thread=threading.get_ident(),
            is_loss=is_loss,
            is_half=is_half,
            loss=total_of(losses) if is_loss else nan,
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
        """The autocast region that a loss was computed in, if that acts on its device."""
        region = self._scene.training_region(device)
        if region is not None:
            return region
        other = self._scene.training_region(None)
        if other is None or other.device_type in self._scene.device_types():
            return None
        self._scene.tell(
            "autocast_device_mismatch",
            other.line,
            seen=f"The region is autocast({other.device_type!r}), but the loss is computed on {device!r} "
            f"(backward is called at {line.file.rpartition('/')[2]}:{line.number}).",
        )
        return None

    def _check_inside(self, device: str, line: Line) -> None:
        regions = [each for each in self._scene.thread.regions if each.dtype is not None and each.device_type == device]
        if all(each.line.is_direct for each in regions[-1:]):
            self._scene.tell("backward_in_autocast", line, seen="backward() is called inside of an autocast region.")

    def _open_window(self, state: OptimizerState, scaler: ScalerState) -> None:
        # A mode of one's own would be in the way of those of another thread, of somebody else's, and of the compiler.
        if threading.current_thread() is not threading.main_thread() or modes_are_on() or compiler_is_in_use():
            return
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
