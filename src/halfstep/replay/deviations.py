"""Where a step in low precision goes away from the same step in fp32 although all of it is finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import torch
from torch import Tensor

from halfstep.records import Deviation, VanishedGradients
from halfstep.replay.alignment import Pair, relative_error
from halfstep.replay.runs import Run

__all__ = ["Deviations", "vanished_gradients"]

# A result is lost that differs by this much of its norm in fp32, and by so many times more than what it was computed from.
_LOST: Final = 0.2
_JUMP: Final = 5.0

# So many operations have to compute with what is lost, each of them with half the error left; elsewhere it made no difference.
_CARRIED: Final = 3

# What a loss and the gradients of a parameter may differ by, and still be the same training.
_LOSS: Final = 0.02
_GRADIENT: Final = 0.3

# Gradients of a parameter that are smaller than this share of those of the whole model are compared with that: they matter little, and
# some, such as those of a bias before a norm, consist of rounding errors alone.
_FLOOR: Final = 0.1

# Gradients below this share of their root mean square in a module do not matter when they become zero.
_NEGLIGIBLE: Final = 1e-3

# A module has lost its gradients where so many of them became zero, out of this many at least.
_VANISHED: Final = 0.5
_FEWEST: Final = 16


@final
class Deviations:
    """How far a run in low precision is from the same step in fp32.

    Args:
        pair: Both.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.loss_error = _loss_error(pair.low.loss, pair.full.loss)
        self.gradient_error, self._worst = _gradient_errors(pair)

    @property
    def harm(self) -> float:
        """How far the loss and the gradients are from those in fp32, in units of what may be."""
        return max(self.loss_error / _LOSS, self._worst / _GRADIENT)

    def jumps(self) -> Iterator[int]:
        """The operations whose results are lost, while what they were computed from is not, and that others compute with."""
        for index, error in enumerate(self._pair.errors):
            op = self._pair.low.ops[index]
            if error is None or error < _LOST or op.phase == "backward" or not op.elements:  # Indices count no elements.
                continue
            if error >= _JUMP * self._pair.input_error(index) and self._is_carried(index):
                yield index

    def at(self, index: int) -> Deviation:
        """What there is to say of one operation."""
        return Deviation(
            error=self._pair.errors[index] or 0.0,
            input_error=self._pair.input_error(index),
            loss_error=self.loss_error,
            gradient_error=self.gradient_error,
        )

    def _is_carried(self, root: int) -> bool:
        waiting, seen, carried = [root], {root}, 0
        while waiting:
            for index in self._pair.low.consumers.get(waiting.pop(), ()):
                if index in seen:
                    continue
                seen.add(index)
                error = self._pair.errors[index]
                if error is None or error >= _LOST / 2:
                    waiting.append(index)
                    carried += error is not None
        return carried >= _CARRIED


def _loss_error(value: float, reference: float) -> float:
    return relative_error(torch.tensor([value], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64))


def _gradient_errors(pair: Pair) -> tuple[float, float]:
    """The relative error of all gradients together, and the largest of a parameter's."""
    difference, norm, count, parts = 0.0, 0.0, 0, []
    for value, reference in _gradients(pair):
        error, size = float(torch.linalg.vector_norm(value - reference)) ** 2, float(torch.linalg.vector_norm(reference)) ** 2
        difference, norm, count = difference + error, norm + size, count + reference.numel()
        parts.append((error, size, reference.numel()))
    if not norm:
        return 0.0, 0.0
    floor = _FLOOR**2 * norm / count
    return (difference / norm) ** 0.5, max((error / max(size, floor * number)) ** 0.5 for error, size, number in parts)


def _gradients(pair: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    for name, reference in pair.full.gradients.items():
        value = pair.low.gradients.get(name)
        if value is not None and not (value.is_sparse or reference.is_sparse):
            yield value.double() / pair.low.scale, reference.double() / pair.full.scale


def vanished_gradients(low: Run, full: Run) -> tuple[VanishedGradients, ...]:
    """The modules more than half of whose gradients became zero, the largest share first.

    Gradients that are negligible beside others of the same module do not count.
    """
    counts: dict[str, list[int]] = {}
    for name, reference in full.gradients.items():
        value = low.gradients.get(name)
        if value is None or reference.is_sparse or value.is_sparse:
            continue
        size = reference.detach().abs().double()
        matters = size > _NEGLIGIBLE * size.square().mean().sqrt()
        count = counts.setdefault(name.rpartition(".")[0], [0, 0])
        count[0] += int((matters & (value == 0)).sum())
        count[1] += int(matters.sum())
    found = [VanishedGradients(module=module, zeros=zeros, elements=elements) for module, (zeros, elements) in counts.items()]
    lost = [each for each in found if each.share > _VANISHED and each.elements >= _FEWEST]
    return tuple(sorted(lost, key=lambda each: (-each.share, -each.elements)))
