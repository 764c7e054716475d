"""The recorder of a trace: runs operations, and notes what there is to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import is_being_traced
from halfstep._torch.tracing import OperationMode, untraced
from halfstep.errors import HalfstepError
from halfstep.numerics.details import Details, OperationDetail
from halfstep.numerics.finiteness import Finiteness
from halfstep.numerics.observations import Losses, Observation, Readings
from halfstep.numerics.operations import Traits, collect_tensors, traits_of, written_tensors
from halfstep.numerics.ranges import Ranges, narrows
from halfstep.numerics.rounding import roundings
from halfstep.numerics.sites import CallSites

__all__ = ["Recorder"]

_NO_READINGS: Final[Readings] = ()


@final
class Recorder:
    """Sees the operations of this thread from `open` to `close`, and those of the backward passes that it starts.

    Args:
        model: The model whose paths modules are known by, as `trace` takes it.
        samples: How many values of each result are kept; with 0 nothing is, and no details are noted.

    Attributes:
        target: The device type that was rehearsed; empty where none was.
    """

    def __init__(self, model: torch.nn.Module | None, *, samples: int) -> None:
        self.target = ""
        self._details = Details(samples, model=model) if samples else None
        self._sites = CallSites(model)
        self._ranges = Ranges()
        self._finiteness = Finiteness(self._ranges)
        self._traits: dict[Any, Traits] = {}
        self._noted: list[tuple[Any, ...]] = []
        self._host_only = not torch.accelerator.is_available()
        self._mode = OperationMode(self._run, pass_by=self._pass_by)

    def open(self) -> None:
        """Begins."""
        self.target = roundings.target
        roundings.watched, roundings.last = True, ()
        self._sites.open()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Puts everything back, and reads what waits on devices."""
        try:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            del self._mode  # It refers back to this, and would keep the model alive until garbage is collected.
            roundings.watched, roundings.last = False, ()
            self._sites.close()
            self._finiteness.close()
        with untraced():
            self._ranges.pending.settle()

    @property
    def count(self) -> int:
        """How many operations have run until now."""
        return len(self._noted)

    def observations(self) -> tuple[Observation, ...]:
        """What was noted, one for each operation; numbers wait on their devices until it is closed."""
        return tuple(Observation(*each) for each in self._noted)

    def details(self) -> tuple[OperationDetail, ...]:
        """The details of the same operations; none where no samples were wanted."""
        return () if self._details is None else tuple(self._details.noted)

    def names(self) -> dict[int, str]:
        """The path of each place among the observations, by number."""
        return self._sites.places.names(each.call[1] for each in self.observations())

    # It runs before and after each operation, and a small one takes no longer than this. So what is common takes the shortest way.
    def _run(self, func: Any, args: Any, kwargs: Any, frame: FrameType | None) -> Any:
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = traits_of(func)
        if traits.is_note:
            return func(*args, **kwargs)
        inputs: list[Tensor] = []
        faults = collect_tensors(args, inputs)
        if kwargs:
            faults |= collect_tensors(kwargs.values(), inputs)
        call = self._sites.current(inputs, frame)
        suspects = self._finiteness.suspects(inputs)
        start = perf_counter()
        result = func(*args, **kwargs)
        seconds: float | None = perf_counter() - start
        losses = None
        with untraced():
            if traits.is_in_place or (type(result) is Tensor and not traits.written):
                outputs: Sequence[Tensor] = (result,)
                readings = self._take_one(traits, result)
            else:
                outputs, readings = self._take_all(traits, result, inputs, args, kwargs)
            if roundings.last or traits.cast_place is not None:
                losses = self._losses(traits, outputs, args)
            if self._details is not None:
                self._details.note(traits, inputs, outputs, (*args, *kwargs.values()))
        if traits.written:
            self._sites.writes(call, inputs)
        if not (self._host_only or all(each.is_cpu for each in (*inputs, *outputs))):
            seconds = None
        dtypes, shapes = tuple([each.dtype for each in inputs]), tuple([(each.dtype, each.numel()) for each in outputs])
        self._noted.append((traits, call, dtypes, shapes, readings, losses, suspects, faults, seconds))
        return result

    def _take_one(self, traits: Traits, result: Tensor) -> Readings:
        """Measures the one tensor that an operation returns, new or written to in place, and takes in whether it is finite."""
        if traits.is_read:
            reading = self._finiteness.take_written(result) if traits.is_in_place else self._finiteness.take(result)
            return _NO_READINGS if reading is None else ((result.dtype, reading),)
        if traits.is_unwritten:
            self._finiteness.trust(result)
        return _NO_READINGS

    def _take_all(self, traits: Traits, result: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> tuple[Sequence[Tensor], Readings]:
        """The results of any operation, or what it has written to where it returns nothing, measured."""
        outputs: list[Tensor] = []
        collect_tensors((result,), outputs)
        written = written_tensors(traits, args, kwargs) if traits.written else []
        outputs = outputs or written
        returned = {id(each) for each in outputs}
        changed = [*inputs, *outputs] if traits.is_collective else [each for each in written if id(each) not in returned]
        for each in changed:
            self._finiteness.forget(each)
        if not traits.is_read:
            return outputs, _NO_READINGS
        targets = {id(each) for each in written}
        readings = []
        for each in outputs[:1] if traits.returns_backward_parts else outputs:
            reading = self._finiteness.take_written(each) if id(each) in targets else self._finiteness.take(each)
            if reading is not None:
                readings.append((each.dtype, reading))
        return outputs, tuple(readings)

    def _losses(self, traits: Traits, outputs: Sequence[Tensor], args: Any) -> Losses:
        """The range of results before they were rounded, and how much each rounding lost."""
        rounded, roundings.last = roundings.last, ()
        if rounded:
            self.target = roundings.target
        exact = tuple(each for each in (self._ranges.measure(wide) for wide, _ in rounded) if each is not None)
        if not rounded and traits.cast_place is not None:
            sources: list[Tensor] = []
            collect_tensors((args[traits.cast_place],), sources)
            rounded = tuple(pair for pair in zip(sources, outputs, strict=False) if narrows(pair[0].dtype, pair[1].dtype))
        lost = (self._ranges.flushed(wide, narrow) for wide, narrow in rounded)
        return exact, tuple(each for each in lost if each is not None)

    def _pass_by(self, func: Any, args: Any, kwargs: Any, frame: FrameType | None) -> None:
        # A question such as `prim.device` is asked from where no exception may come through.
        if is_being_traced() and not str(func).startswith("prim."):
            raise HalfstepError(
                "Something is being compiled inside of a trace, which sees operations only where they run one by one. Compile it before, "
                'or call torch.compiler.set_stance("force_eager") for as long as you trace.'
            )
        inputs: list[Tensor] = []
        collect_tensors((*args, *kwargs.values()), inputs)
        self._sites.current(inputs, frame)
