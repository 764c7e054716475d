"""Which operation broke: infinities and NaN, from where they begin to where they do harm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, final

from halfstep.numerics import OUTSIDE
from halfstep.records import Phase
from halfstep.replay.alignment import Pair
from halfstep.replay.runs import Run

__all__ = ["Faults", "consumers_of", "entering_fault", "own_faults"]

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
        self._consumers = consumers_of(pair.low)

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
        waiting, seen = [root], {root}
        while waiting:
            index = waiting.pop()
            op = self._low.ops[index]
            if self._excess[index]:
                consumers = self._consumers[index]
                if op.nans or op.phase == "backward" or not consumers:
                    return True
                new = [each for each in consumers if each not in seen]
                seen.update(new)
                waiting.extend(new)
            elif op.has_nonfinite_input and (op.op == _READ or (self._errors[index] or 0.0) > _HIDDEN):
                return True
        return False


def _sources(run: Run, index: int) -> Sequence[int]:
    """The operations that made what an operation was given, where some of it is not finite."""
    if not run.ops[index].has_nonfinite_input:
        return ()
    return [each for each in run.details[index].sources if each != OUTSIDE]


def consumers_of(run: Run) -> dict[int, list[int]]:
    """For each operation of a run the operations that were given what it made."""
    consumers: dict[int, list[int]] = defaultdict(list)
    for index in range(len(run.ops)):
        for source in dict.fromkeys(run.details[index].sources):
            if source != OUTSIDE:
                consumers[source].append(index)
    return consumers


def own_faults(run: Run) -> int | None:
    """The index of the operation that breaks a run by itself, without another one to compare it with; `None` where none does.

    It is the first that makes something non-finite out of finite values which then becomes NaN, or reaches a gradient or a result that
    nobody uses further. Where infinities are all that there is to begin with, it is the first that makes NaN of them.
    """
    consumers = consumers_of(run)
    for index, op in enumerate(run.ops):
        if op.makes_nonfinite and _reaches_an_end(run, index, consumers):
            return index
    return next((index for index, op in enumerate(run.ops) if op.makes_nan), None)


def entering_fault(run: Run, *, only_gradients: bool = False) -> int | None:
    """The index of the first operation that was given something non-finite from outside of the step, which then does harm; or `None`.

    Args:
        run: The run.
        only_gradients: Whether only what reaches a gradient counts, since the run may hold more than a step.
    """
    consumers = consumers_of(run)
    for index, op in enumerate(run.ops):
        detail = run.details[index]
        if only_gradients and not _reaches_gradients(run, index, consumers):
            continue
        if not op.has_nonfinite_input or OUTSIDE not in detail.sources or any(each - each != 0 for each in detail.numbers):
            continue
        if not any(run.ops[each].nonfinite for each in _sources(run, index)) and _reaches_an_end(run, index, consumers):
            return index
    return None


def _reaches_gradients(run: Run, root: int, consumers: dict[int, list[int]]) -> bool:
    waiting, seen = [root], {root}
    while waiting:
        index = waiting.pop()
        if not run.ops[index].nonfinite:
            continue
        if run.ops[index].phase == "backward":
            return True
        new = [each for each in consumers[index] if each not in seen]
        seen.update(new)
        waiting.extend(new)
    return False


def _reaches_an_end(run: Run, root: int, consumers: dict[int, list[int]]) -> bool:
    waiting, seen = [root], {root}
    while waiting:
        index = waiting.pop()
        op = run.ops[index]
        if op.op == _READ and op.has_nonfinite_input:
            return True
        if not op.nonfinite:
            continue
        if op.nans or op.phase == "backward" or not consumers[index]:
            return True
        new = [each for each in consumers[index] if each not in seen]
        seen.update(new)
        waiting.extend(new)
    return False
