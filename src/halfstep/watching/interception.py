"""The functions of torch through which a loop is followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from halfstep._torch.watching import CLIPPING, NORMS, hook_all_steps, loader_iterators
from halfstep.engine import step_observers
from halfstep.watching import surroundings, wrappers
from halfstep.watching.aftermath import Aftermath
from halfstep.watching.alike import AlikeSteps
from halfstep.watching.passes import BackwardEvents
from halfstep.watching.patches import Patches
from halfstep.watching.regions import RegionEvents
from halfstep.watching.scaling import ScalerEvents
from halfstep.watching.scene import Scene
from halfstep.watching.stepping import StepEvents
from halfstep.watching.wrappers import Make

__all__ = ["Interception"]


@final
class Interception:
    """Has the functions of torch that make up a training step say what they do, until it is closed.

    Args:
        scene: What is known of the process.
        steps: What is taken in of optimizers.
        scalers: What is taken in of scalers.
        aftermath: What is taken in of skipped steps.
        alike: What is taken in of steps that are not looked at.
    """

    def __init__(self, scene: Scene, steps: StepEvents, scalers: ScalerEvents, aftermath: Aftermath, alike: AlikeSteps) -> None:
        self._scene = scene
        self._steps = steps
        self._scalers = scalers
        self._aftermath = aftermath
        self._alike = alike
        self._of_scalers: dict[str, Make] = {
            "scale": wrappers.around_scale(scene, scalers),
            "unscale_": wrappers.around_unscale(scene, scalers),
            "step": wrappers.around_step(scene, scalers, alike),
            "update": wrappers.around_update(scene, scalers, alike),
            "state_dict": wrappers.around_state_dict(scene, scalers),
        }
        self._patches = Patches()
        self._adopted: set[type] = set()
        self._hooks: tuple[Any, ...] = ()

    def open(self) -> None:
        """Begins."""
        try:
            self._follow_forward_and_backward()
            self._follow_steps()
            self._follow_batches()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Puts everything back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        if self._steps.observe_engine in step_observers:
            step_observers.remove(self._steps.observe_engine)
        self._patches.undo()

    def _follow_forward_and_backward(self) -> None:
        scene, regions = self._scene, RegionEvents(self._scene)
        for name, around in (
            ("__init__", surroundings.around_region_init),
            ("__call__", surroundings.around_region_call),
            ("__enter__", surroundings.around_region_enter),
            ("__exit__", surroundings.around_region_exit),
        ):
            self._patches.wrap(torch.autocast, name, around(scene, regions), pauses=name != "__call__")
        self._patches.wrap(torch.autograd, "backward", wrappers.around_backward(scene, BackwardEvents(scene), self._alike))

    def _follow_steps(self) -> None:
        scene, steps, scalers = self._scene, self._steps, self._scalers
        self._patches.wrap(LRScheduler, "__init__", wrappers.once_made(scene, lambda scheduler, _: self._adopt_scheduler(type(scheduler))))
        self._patches.wrap(Optimizer, "__init__", wrappers.once_made(scene, lambda optimizer, _: steps.made(optimizer)))
        for kind in _kinds_of(torch.amp.GradScaler):
            self._adopt_scaler(kind)
        for kind in _kinds_of(LRScheduler):
            self._adopt_scheduler(kind)
        self._patches.wrap(*CLIPPING, wrappers.around_clipping(scene, scalers, self._alike), in_graphs=True)
        self._patches.wrap(*NORMS, wrappers.around_total_norm(scene), in_graphs=True)
        scene.at_change = self._change
        self._hooks = hook_all_steps(*wrappers.around_optimizer_step(scene, steps))
        step_observers.append(steps.observe_engine)

    def _follow_batches(self) -> None:
        iterators: dict[int, int] = {}
        self._patches.wrap(DataLoader, "__iter__", surroundings.before_passes(self._scene, {}, iterators))
        self._patches.wrap(loader_iterators(), "__next__", surroundings.before_batches(self._scene, iterators))

    def _change(self) -> None:
        """Steps are looked at from now on, or are not: what is of no use then costs nothing."""
        # A region that is open would end unseen.
        if self._scene.is_looking or self._scene.forced is not None or self._scene.thread.regions:
            self._patches.resume()
        else:
            self._patches.pause()

    def _scaler_made(self, scaler: Any, frame: Any) -> None:
        for kind in type(scaler).__mro__:
            if issubclass(kind, torch.amp.GradScaler):
                self._adopt_scaler(kind)
        self._scalers.made(scaler, frame)

    def _adopt_scaler(self, kind: type) -> None:
        """Follows the methods that a class of scalers has of its own; a subclass may override them without calling those above."""
        if kind not in self._adopted:
            self._adopted.add(kind)
            if "__init__" in vars(kind):
                self._patches.wrap(kind, "__init__", wrappers.once_made(self._scene, self._scaler_made))
            for name, make in self._of_scalers.items():
                if name in vars(kind):
                    self._patches.wrap(kind, name, make, pauses=name in {"scale", "unscale_"})

    def _adopt_scheduler(self, kind: type) -> None:
        for each in kind.__mro__:
            # A plateau is waited for once an epoch, whatever became of the last step.
            if each not in self._adopted and issubclass(each, LRScheduler) and not issubclass(each, ReduceLROnPlateau):
                self._adopted.add(each)
                if "step" in vars(each):
                    self._patches.wrap(each, "step", wrappers.around_schedule(self._scene, self._aftermath))


def _kinds_of(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for each in below:
        yield from _kinds_of(each)
