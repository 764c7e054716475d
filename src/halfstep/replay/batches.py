"""A batch as a step was given it, however often the step runs and whatever it does to the batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import Any, final

import torch
from torch import Tensor

from halfstep._torch import tree_map, version_of
from halfstep.replay.inputs import named_tensors

__all__ = ["KeptBatch"]


@final
class KeptBatch:
    """A batch whose tensors are put back before each use, and whose containers are copied.

    Args:
        batch: The batch.

    Example:
        >>> kept = KeptBatch({"x": torch.ones(2), "y": 1})
        >>> kept.given().pop("y"), kept.given()["x"].zero_().tolist(), kept.given()
        (1, [0.0, 0.0], {'x': tensor([1., 1.]), 'y': 1})
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._kept = [_KeptTensor(tensor) for _, tensor in named_tensors(batch, "")]

    def given(self) -> Any:
        """The batch, as it was."""
        self.put_back()
        return tree_map(lambda leaf: copy(leaf) if isinstance(leaf, Mapping) else leaf, self.batch)

    def put_back(self) -> None:
        """Puts its tensors to what they were."""
        for each in self._kept:
            each.put_back()


@final
class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else version_of(tensor)
        self._value = None if tensor.is_inference() else tensor.detach().clone()

    def put_back(self) -> None:
        if self._value is None or version_of(self._tensor) == self._version:
            return
        with torch.no_grad(), suppress(RuntimeError):  # One that nobody can write to was not written to.
            self._tensor.copy_(self._value)
        self._version = version_of(self._tensor)
