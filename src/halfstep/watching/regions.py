"""Autocast regions, as they are entered and left."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from halfstep._torch.watching import is_given_enabled, override_region, region_dtype, region_is_enabled, region_keeps_casts
from halfstep.watching.lines import Line, line_above
from halfstep.watching.scene import Scene
from halfstep.watching.states import RegionState

__all__ = ["RegionEvents"]


@final
class RegionEvents:
    """What is taken in of autocast regions.

    Args:
        scene: What is known of the process.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._decorators: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()

    def made(self, region: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A region was made, and was given these arguments."""
        if not region_is_enabled(region) and is_given_enabled(arguments, keywords):
            self._scene.refused.add(region)

    def decorates(self, region: Any, frame: FrameType | None) -> None:
        """A function is decorated with a region, which is entered whenever that is called."""
        self._decorators[region] = line_above(frame)

    def enter(self, region: Any, frame: FrameType | None) -> Callable[[], None] | None:
        """A region is about to be entered.

        Returns:
            What puts it back as it was once it has been entered, if it was changed.
        """
        scene = self._scene
        here = scene.thread
        if here.window is not None:
            scene.close_window()
        put_back = None
        is_enabled = region_is_enabled(region)
        if scene.forced is not None and is_enabled and region_dtype(region) is torch.float16:
            put_back = override_region(region, scene.forced if isinstance(scene.forced, torch.dtype) else None)
            is_enabled = region_is_enabled(region)
        state = RegionState(
            identity=id(region),
            device_type=region.device,
            dtype=region_dtype(region) if is_enabled else None,
            is_meant=is_enabled or region in scene.refused,
            keeps_casts=region_keeps_casts(region),
            is_training=torch.is_grad_enabled(),
            line=self._decorators.get(region) or line_above(frame) if self._decorators else line_above(frame),
        )
        if (
            state.is_meant
            and state.is_training
            and not any(each.is_meant and each.device_type == state.device_type for each in here.regions)
        ):
            before, steps = here.entered.pop(state.device_type, (None, -1))
            is_other = before is not None and before.dtype is not state.dtype
            here.is_mixed = is_other or (here.is_mixed and steps == scene.steps)
            here.entered[state.device_type] = state, scene.steps
        here.regions.append(state)
        return put_back

    def leave(self, region: Any) -> None:
        """A region was left."""
        regions = self._scene.thread.regions
        if regions and regions[-1].identity == id(region):
            regions.pop()
