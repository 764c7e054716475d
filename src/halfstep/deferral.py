"""Values of past steps that lie on the device until one of them is asked for, and are then read together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor

__all__ = ["DeferredValues"]


@final
class DeferredValues:
    """Tensors whose numbers somebody may want later, one for each name, of one step.

    Those of an engine's steps wait together: the first that is asked for brings in all that are still held by somebody, in one transfer.
    A training loop that looks at its records every hundred steps makes the host wait once in a hundred steps.

    Args:
        tensors: With one element each, and not written to any more.
        waiting: The values of the same engine that were not read yet; this object adds itself.

    Example:
        >>> waiting = WeakSet()
        >>> first, second = (DeferredValues({"loss": torch.tensor(loss)}, waiting) for loss in (0.5, 0.25))
        >>> second.read(), len(waiting)
        ({'loss': 0.25}, 0)
    """

    __slots__ = ("__weakref__", "_tensors", "_values")

    def __init__(self, tensors: Mapping[str, Tensor], waiting: WeakSet[DeferredValues]) -> None:
        self._tensors: tuple[Mapping[str, Tensor], WeakSet[DeferredValues]] | None = (tensors, waiting)
        self._values: dict[str, float] = {}
        waiting.add(self)

    def read(self) -> dict[str, float]:
        """The numbers, by name."""
        if self._tensors is not None:
            _, waiting = self._tensors
            _read_all([*waiting])
            waiting.clear()
        return self._values


def _read_all(deferred: list[DeferredValues]) -> None:
    tensors = [(each, name, tensor) for each in deferred if each._tensors is not None for name, tensor in each._tensors[0].items()]
    device = tensors[0][2].device
    # In float64 no value of a float type, and no learning rate, is rounded.
    together = torch.stack([tensor.detach().reshape(()).to(device, torch.float64) for _, _, tensor in tensors])
    for (each, name, _), value in zip(tensors, together.tolist(), strict=True):
        each._values[name] = value
    for each in deferred:
        each._tensors = None
