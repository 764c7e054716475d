"""Which operation broke: infinities and NaN, from where they begin to where they do harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

from halfstep.numerics import OUTSIDE
from halfstep.records import Phase
from halfstep.replay.alignment import Pair
from halfstep.replay.runs import Run

__all__ = ["Faults", "entering_fault", "own_faults"]

# An operation that turns infinities into finite values of which these are further from those in fp32 has hidden them.
_HIDDEN: Final = 0.1

# Python reads a number from a tensor.
_READ: Final = "aten._local_scalar_dense.default"


@final
class Faults:
    """What is not finite in a run in low precision, and is finite in fp32.

    What is not finite in both is meant so: a mask of -inf, the logarithm of a zero that is masked away, the start of a running maximum.
    The others are followed from operation to operation. They do harm where they become NaN, reach the loss, a gradient or a result that
    nobody uses further, or where they are turned into finite values that are wrong, as `rsqrt(inf) = 0` is. They do none where the values
    are right: the softmax of a constant that is -inf in half precision is 0, as it is in fp32.

    Args:
        pair: The run in low precision, and the one in fp32.
    """

    def __init__(self, pair: Pair) -> None:
        self._low = pair.low
        self._errors = pair.errors
        self._excess: list[bool] = []
        for index in range(len(pair.low.ops)):
            self._excess.append(self._exceeds(index, pair))

    def first(self, phase: Phase) -> int | None:
        """The index of the first operation of a phase that makes something non-finite that does harm; `None` where none does."""
        return next((root for root in self._roots(phase) if self._harms(root)), None)

    @property
    def has_hidden(self) -> bool:
        """Whether something is not finite in the forward pass without doing harm, as far as samples tell."""
        return any(True for _ in self._roots("forward"))

    def _exceeds(self, index: int, pair: Pair) -> bool:
        op, other = pair.low.ops[index], pair.counterpart(index)
        if not op.nonfinite:
            return False
        if other is None:  # A cast that fp32 needs none of, say: whether it adds to what it was given is all that can be told.
            sources = [source for source in pair.low.details[index].sources if source != OUTSIDE]
            given = max((pair.low.ops[source].nonfinite for source in sources), default=0)
            return op.makes_nonfinite or any(self._excess[source] for source in sources) or (bool(sources) and op.nonfinite > given > 0)
        return op.nonfinite > other.nonfinite or op.nans > other.nans

    def _roots(self, phase: Phase) -> Iterator[int]:
        for index, op in enumerate(self._low.ops):
            if self._excess[index] and op.phase == phase and not any(map(self._is_excess, _sources(self._low, index))):
                yield index

    def _is_excess(self, index: int) -> bool:
        return self._excess[index]

    def _harms(self, root: int) -> bool:
        return any(self._does_harm(index) for index in _reached(self._low, root, through=self._is_excess))

    def _does_harm(self, index: int) -> bool:
        op = self._low.ops[index]
        if self._excess[index]:
            return op.nans > 0 or op.phase == "backward" or not self._low.consumers.get(index)
        return op.has_nonfinite_input and (op.op == _READ or (self._errors[index] or 0.0) > _HIDDEN)


def _sources(run: Run, index: int) -> Sequence[int]:
    """The operations that made what an operation was given, where some of it is not finite."""
    if not run.ops[index].has_nonfinite_input:
        return ()
    return [each for each in run.details[index].sources if each != OUTSIDE]


def _reached(run: Run, root: int, *, through: Callable[[int], bool]) -> Iterator[int]:
    """An operation and all that what it made has come to, through operations of which something holds; those that end it, too."""
    waiting, seen = [root], {root}
    while waiting:
        index = waiting.pop()
        yield index
        if through(index):
            new = [each for each in run.consumers.get(index, ()) if each not in seen]
            seen.update(new)
            waiting.extend(new)


def own_faults(run: Run) -> int | None:
    """The index of the operation that breaks a run by itself, without another one to compare it with; `None` where none does.

    It is the first that makes something non-finite out of finite values which then becomes NaN, or reaches a gradient or a result that
    nobody uses further. Where infinities are all that there is to begin with, it is the first that makes NaN of them.
    """
    for index, op in enumerate(run.ops):
        if op.makes_nonfinite and _reaches_an_end(run, index):
            return index
    return next((index for index, op in enumerate(run.ops) if op.makes_nan), None)


def entering_fault(run: Run, *, only_gradients: bool = False) -> int | None:
    """The index of the first operation that was given something non-finite from outside of the step, which then does harm; or `None`.

    Args:
        run: The run.
        only_gradients: Whether only what reaches a gradient counts, since the run may hold more than a step.
    """
    for index, op in enumerate(run.ops):
        detail = run.details[index]
        if not op.has_nonfinite_input or OUTSIDE not in detail.sources or any(each - each != 0 for each in detail.numbers):
            continue
        if any(run.ops[each].nonfinite for each in _sources(run, index)):
            continue
        if _reaches_gradients(run, index) if only_gradients else _reaches_an_end(run, index):
            return index
    return None


def _reaches_gradients(run: Run, root: int) -> bool:
    reached = (run.ops[index] for index in _reached(run, root, through=lambda index: run.ops[index].nonfinite > 0))
    return any(op.nonfinite and op.phase == "backward" for op in reached)


def _reaches_an_end(run: Run, root: int) -> bool:
    return any(_is_end(run, index) for index in _reached(run, root, through=lambda index: run.ops[index].nonfinite > 0))


def _is_end(run: Run, index: int) -> bool:
    op = run.ops[index]
    if op.op == _READ and op.has_nonfinite_input:
        return True
    return op.nonfinite > 0 and (op.nans > 0 or op.phase == "backward" or not run.consumers.get(index))
