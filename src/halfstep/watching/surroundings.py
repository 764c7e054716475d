"""What stands around the functions of torch that a training step lies between: autocast's regions, and the batches of a loader."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from halfstep.watching.regions import RegionEvents
from halfstep.watching.scene import Scene
from halfstep.watching.wrappers import Make

__all__ = [
    "around_region_call",
    "around_region_enter",
    "around_region_exit",
    "around_region_init",
    "before_batches",
    "before_passes",
]

_frame = sys._getframe


def around_region_init(scene: Scene, regions: RegionEvents) -> Make:
    """For `autocast.__init__`."""
    made = scene.guarded(regions.made)

    def make(original: Any) -> Callable[..., Any]:
        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            original(self, device_type, *args, **kwargs)
            if scene.is_active and scene.is_looking:
                made(self, (device_type, *args), kwargs)

        return init

    return make


def around_region_call(scene: Scene, regions: RegionEvents) -> Make:
    """For `autocast.__call__`, which decorates a function."""
    decorates = scene.guarded(regions.decorates)

    def make(original: Any) -> Callable[..., Any]:
        def decorate(self: Any, func: Any) -> Any:
            if scene.is_active:
                decorates(self, _frame(1))
            return original(self, func)

        return decorate

    return make


def around_region_enter(scene: Scene, regions: RegionEvents) -> Make:
    """For `autocast.__enter__`."""
    entering = scene.guarded(regions.enter)

    def make(original: Any) -> Callable[..., Any]:
        def enter(self: Any) -> Any:
            if not scene.is_active or not (scene.is_looking or scene.forced):
                return original(self)
            put_back = entering(self, _frame(1))
            if put_back is None:
                return original(self)
            try:
                return original(self)
            finally:
                put_back()

        return enter

    return make


def around_region_exit(scene: Scene, regions: RegionEvents) -> Make:
    """For `autocast.__exit__`."""

    def make(original: Any) -> Callable[..., Any]:
        def leave(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
            if scene.thread.regions:
                regions.leave(self)
            return original(self, exc_type, exc_val, exc_tb)

        return leave

    return make


def before_passes(scene: Scene, numbers: dict[int, int], iterators: dict[int, int]) -> Make:
    """For `DataLoader.__iter__`.

    Args:
        scene: What is known of the process.
        numbers: How many passes were begun over each dataset, by its `id`.
        iterators: The number of the pass that each iterator makes, by its `id`.
    """

    def make(original: Any) -> Callable[..., Any]:
        def iterate(self: Any) -> Any:
            iterator = original(self)
            if scene.is_active:
                data = id(getattr(self, "dataset", self))  # A loader may be made anew for each pass.
                numbers[data] = iterators[id(iterator)] = numbers.get(data, 0) + 1
            return iterator

        return iterate

    return make


def before_batches(scene: Scene, iterators: dict[int, int]) -> Make:
    """For the `__next__` of what iterates over a `DataLoader`."""

    def make(original: Any) -> Callable[..., Any]:
        def advance(self: Any) -> Any:
            batch = original(self)
            if scene.is_active and torch.is_grad_enabled():  # An evaluation is no pass of the training.
                scene.epoch = iterators.get(id(self))
            return batch

        return advance

    return make
