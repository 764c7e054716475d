"""The state of every random number generator that a training step may draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from typing_extensions import Self

__all__ = ["RandomState", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, on the CPU and on every CUDA device.

    Args:
        seed: From 0 to 2**32 - 1, the range that NumPy accepts.

    Example:
        >>> seed_everything(0); first = torch.rand(2)
        >>> seed_everything(0); bool((torch.rand(2) == first).all())
        True
    """
    random.seed(seed)
    np.random.seed(seed)  # the legacy global generator is the one that user code draws from
    torch.manual_seed(seed)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # arrays and tensors have no single truth value to compare by
class RandomState:
    """A snapshot of the global generators, so that training loops that take turns do not draw from each other's streams.

    Attributes:
        python: `random.getstate()`.
        numpy: `numpy.random.get_state()`.
        cpu: The state of torch's CPU generator, a uint8 tensor.
        cuda: The states of the CUDA generators, one tensor a device; empty when CUDA was not used yet.

    Example:
        >>> state = RandomState.capture()
        >>> first = torch.rand(2)
        >>> state.restore()
        >>> bool((torch.rand(2) == first).all())
        True
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def capture(cls) -> Self:
        """The state of all generators now."""
        initialized: Callable[[], bool] = torch.cuda.is_initialized  # torch leaves this function untyped
        cuda = tuple(torch.cuda.get_rng_state_all()) if initialized() else ()
        return cls(python=random.getstate(), numpy=np.random.get_state(), cpu=torch.get_rng_state(), cuda=cuda)

    def restore(self) -> None:
        """Puts all generators back into this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
