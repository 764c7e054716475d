"""Everything that is known of a process whose training is followed."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar, cast, final
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._torch import torch_scale
from halfstep.engine import is_driven, times_driven
from halfstep.errors import PersistentSkipsError
from halfstep.records import UNKNOWN, Alert, StepRecord
from halfstep.scaler import LossScaler
from halfstep.watching.lines import Line
from halfstep.watching.measures import Measures, StepFacts, number_of, scaled_down
from halfstep.watching.misuse import alert_of
from halfstep.watching.states import OptimizerState, RegionState, ScalerState, parameters_of
from halfstep.watching.windows import GradientWindow

__all__ = ["Scene", "current_scale"]

_T = TypeVar("_T")

# A loop that does the same thing wrong at ever new lines would fill a log with it.
_MOST_OF_ONE_KIND: Final = 20

# So many optimizers of one class have a name each; what is known of each is kept as long as the run.
_MOST_NAMES: Final = 32

# Where one optimizer steps again and again, its first steps are looked at, and then one of so many. To look at all would be felt in a loop
# of small steps.
_LOOKED_AT: Final = 40
_LOOK_EVERY: Final = 64


@final
class _Thread(threading.local):
    """What belongs to one thread.

    Attributes:
        regions: The autocast regions that it is in, the innermost last.
        entered: For each device type, the last outermost one that was entered with gradients on, and how many steps the process had
            made by then.
        is_mixed: Whether another one, of another precision, was entered since the step before.
        depth: How many of the functions that are followed call each other now.
        stepping: The optimizer that a scaler steps now.
        window: What looks at operations between the backward pass and whatever follows.
        norm_type: Of the norm of gradients that was computed last.
    """

    def __init__(self) -> None:
        self.regions: list[RegionState] = []
        self.entered: dict[str, tuple[RegionState, int]] = {}
        self.is_mixed = False
        self.depth = 0
        self.stepping: OptimizerState | None = None
        self.window: GradientWindow | None = None
        self.norm_type = 2.0


@final
class Scene:
    """The scalers, optimizers and regions of a process, and where records and alerts go.

    Args:
        observe: Is given each step, with the optimizer and the line that stepped it.
        tell: Is given each alert.

    Attributes:
        is_active: Whether the process is followed; a child that was forked is not.
        is_looking: Whether each event is looked at. In between, where one optimizer does the same step by step, the numbers alone are.
        at_change: Is called when that changes.
        acts: Whether something may be done about skips.
        losses: What was called backward on meanwhile.
        others: The same, where it did not reach the parameter that is asked.
        last: The optimizer that has stepped last.
        thread: What belongs to the current thread.
        steps: How many steps were made by all optimizers together.
        epoch: The number of the pass over the data; `None` where it is not known.
        places: Where the scaler was made that an alert of a rule would be about, by the name of the rule.
        meant: Exceptions that are to reach the script.
        retired: Scalers that are gone and that never updated.
        refused: Autocast regions that torch has switched off, since there is no such device.
        forced: What each region is to compute in instead of fp16: a dtype, or `"off"`; `None` for what it asks for.
    """

    def __init__(
        self, *, observe: Callable[[OptimizerState | None, StepRecord | StepFacts, Line], None], tell: Callable[[Alert], None]
    ) -> None:
        self.is_active = True
        self.is_looking = True
        self.losses: list[float | Tensor] = []
        self.others: list[float | Tensor] = []
        self.last: OptimizerState | None = None
        self.acts = False
        self.at_change: Callable[[], None] = lambda: None
        self._alike = 0
        self.thread = _Thread()
        self.steps = 0
        self.epoch: int | None = None
        self.refused: WeakSet[Any] = WeakSet()
        self.forced: torch.dtype | str | None = None
        self.observe = observe
        self.measures = Measures()
        self.optimizers: dict[int, OptimizerState] = {}
        self.scalers: dict[int, ScalerState] = {}
        self.places: dict[str, Line] = {}
        self.meant: list[BaseException] = []
        self.retired: list[ScalerState] = []
        self._driven = 0
        self._tell = tell
        self._names: dict[str, int] = {}
        self._told: set[tuple[str, str, int]] = set()
        self._counts: dict[str, int] = {}

    def find_existing(self) -> None:
        """Takes in the optimizers and scalers that were made before."""
        gc.collect()  # What nobody holds any longer is not followed.
        for each in gc.get_objects():
            kind = type(each)
            if issubclass(kind, Optimizer) and getattr(each, "param_groups", None):
                self.optimizer(each)
            elif issubclass(kind, torch.amp.GradScaler) and (state := self.scaler(each)) is not None:
                state.was_used = each.stats().steps > 0 if isinstance(each, LossScaler) else torch_scale(each) is not None

    def optimizer(self, optimizer: Any) -> OptimizerState | None:
        """What is known of an optimizer; `None` where an engine of halfstep's drives it."""
        state = self.optimizers.get(id(optimizer))
        if state is not None and times_driven() == self._driven:
            return state
        if isinstance(optimizer, Optimizer) and is_driven(optimizer):
            self.optimizers.pop(id(optimizer), None)
            return None
        if state is None:
            identity = id(optimizer)
            try:
                reference = ref(optimizer, lambda _: self.optimizers.pop(identity, None))
            except TypeError:  # It is of a class that knows no weak references.
                return None
            state = self.optimizers[identity] = OptimizerState(optimizer=reference)
        return state

    def free_optimizers(self) -> list[OptimizerState]:
        """All optimizers but those that an engine drives."""
        if (count := times_driven()) != self._driven:
            self._driven = count
            for identity in [identity for identity, each in self.optimizers.items() if is_driven(cast("Optimizer", each.optimizer()))]:
                del self.optimizers[identity]
        return [*self.optimizers.values()]

    def scaler(self, scaler: Any) -> ScalerState | None:
        """What is known of a scaler; `None` where it is switched off."""
        state = self.scalers.get(id(scaler))
        if state is None:
            if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
                return None
            identity = id(scaler)
            state = self.scalers[identity] = ScalerState(scaler=ref(scaler, lambda _: self._retire(identity)))
        return state

    def _retire(self, identity: int) -> None:
        """A scaler is gone; what is to be said of it in the end is kept."""
        state = self.scalers.pop(identity, None)
        if state is not None and state.steps and not state.updates:
            self.retired.append(state)

    def name(self, state: OptimizerState) -> str:
        """What records call an optimizer: nothing where it is the first of its process, and there is no other."""
        kind = type(state.optimizer()).__name__
        count = self._names[kind] = self._names.get(kind, 0) + 1
        if count > _MOST_NAMES:  # Such as one for each task of a meta-learner.
            return f"{kind} (others)"
        if len(self.optimizers) == 1 and sum(self._names.values()) == 1:
            return ""
        return kind if count == 1 else f"{kind} {count}"

    def unused_scaler(self) -> ScalerState | None:
        """A scaler that is switched on and was never used."""
        return next((each for each in self.scalers.values() if not each.is_used), None)

    def has_stepped(self, state: OptimizerState) -> None:
        """Decides, after a step, whether the next one is looked at."""
        self.losses.clear()
        self.others.clear()
        self._alike = self._alike + 1 if state is self.last else 0
        self.last = state
        if (self._alike < _LOOKED_AT or self._alike % _LOOK_EVERY == 0) != self.is_looking:
            self.look(not self.is_looking)

    def look(self, is_looking: bool) -> None:  # noqa: FBT001 - it is what changes
        """Begins or ends to look at each event. What was seen before says nothing of what comes."""
        if self.thread.window is not None:
            self.close_window()
        self.is_looking = is_looking
        self.at_change()
        if not is_looking:
            return
        if self.losses and self.last is not None and self.last.was_scaled and self.last.scaler is not None:
            self.losses[:] = [scaled_down(each, self.last.scaler.scale) for each in self.losses]
        for each in self.optimizers.values():
            each.contributions.clear()
            each.is_stepped, each.is_unscaled = True, False
        for scaler in self.scalers.values():
            scaler.unscaled.clear()
            scaler.constants.clear()

    def receivers(self, parameters: list[Tensor]) -> Iterator[OptimizerState]:
        """The optimizers of some of these parameters."""
        given = {id(each) for each in parameters}
        for each in self.optimizers.values():
            each.refresh()
            if not given.isdisjoint(each.identities):
                yield each

    def training_region(self, device_type: str | None) -> RegionState | None:
        """The autocast region of the forward pass whose backward pass comes now, of a device type or of any."""
        found = [
            region
            for region, steps in self.thread.entered.values()
            # Several optimizers may step after one forward pass each, or after one for all.
            if self.steps - steps < max(len(self.optimizers), 1) and device_type in {None, region.device_type}
        ]
        return found[-1] if found else None

    def device_types(self) -> set[str]:
        """The types of the devices that parameters are on."""
        found = (parameters_of(each.optimizer()) for each in self.optimizers.values())
        return {each.device.type for parameters in found for each in parameters[:1]}

    def guarded(self, event: Callable[..., _T]) -> Callable[..., _T | None]:
        """An event that ends the following where it fails, and never the script; it returns `None` then."""

        def run(*arguments: Any) -> _T | None:
            try:
                return event(*arguments)
            except Exception as error:
                self.failed(error)
                return None

        return run

    def failed(self, error: BaseException) -> None:
        """Something went wrong in the following itself. The script goes on, and is followed no longer.

        Raises:
            BaseException: The error, where its user means it to reach the script.
        """
        if isinstance(error, PersistentSkipsError) or error in self.meant or not isinstance(error, Exception):
            raise error
        if self.is_active:
            self.is_active = False
            where = traceback.extract_tb(error.__traceback__)[-1]
            with suppress(Exception):  # Where standard error is closed, there is nobody to be told.
                sys.stderr.write(
                    f"halfstep warning: the training is not watched any longer, since {type(error).__name__}: {error} "
                    f"({where.filename}:{where.lineno}). The training goes on. This is a bug in halfstep; please report it.\n"
                )

    def is_told(self, rule: str, line: Line) -> bool:
        """Whether nothing more is to be said of a rule at a line."""
        return (rule, line.file, line.number) in self._told or self._counts.get(rule, 0) >= _MOST_OF_ONE_KIND

    def tell(
        self, rule: str, line: Line, *, seen: str, state: OptimizerState | None = None, at: int | None = None, module: str = UNKNOWN
    ) -> None:
        """Raises an alert, once for each line.

        Args:
            rule: What is wrong.
            line: Where.
            seen: What was seen.
            state: The optimizer in whose step that was; without it, that of the one that has stepped most.
            at: The number of the step, where it is not the next one of that optimizer.
            module: The module that it is about.
        """
        if self.is_told(rule, line):
            return
        self._told.add((rule, line.file, line.number))
        self._counts[rule] = self._counts.get(rule, 0) + 1
        if at is None:
            at = 1 + (max((each.steps for each in self.optimizers.values()), default=0) if state is None else state.steps)
        self._tell(alert_of(rule, line, step=at, seen=seen, module=module))

    def close_window(self) -> None:
        """Ends the look at what happens between the backward pass and whatever comes now."""
        window, self.thread.window = self.thread.window, None
        if window is not None:
            window.close()
            for rule, line, seen in window.findings():
                self.tell(rule, line, seen=seen, state=window.state)


def current_scale(scaler: Any) -> float | Tensor:
    """The scale of a scaler that has scaled something: a number on a CPU, a tensor that nothing writes to elsewhere."""
    tensor = torch_scale(scaler) if not isinstance(scaler, LossScaler) else None
    return float(scaler.get_scale()) if tensor is None else number_of(tensor)
