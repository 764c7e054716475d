"""The state of every random number generator that a training step may draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, Final, final

import numpy as np
import torch
from typing_extensions import Self

from halfstep.errors import ConfigurationError

__all__ = ["RandomState", "seed_everything"]

# The only kind that NumPy's global generator can be put back into by its state.
_NUMPYS: Final = "MT19937"


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

    def to_plain(self) -> dict[str, Any]:
        """The same as numbers, lists and tensors, which can be written to a file that nobody has to trust.

        Raises:
            ConfigurationError: NumPy's global generator is of a kind that it cannot be put back into.
        """
        if not isinstance(self.numpy, tuple):
            raise ConfigurationError(
                f"NumPy's global random generator is a {self.numpy['bit_generator']}, which cannot be put back. Use {_NUMPYS}, as it "
                "is by default."
            )
        kind, keys, position, has_gauss, gauss = self.numpy
        version, internal, next_gauss = self.python
        return {
            "python": [version, list(internal), next_gauss],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
            "cpu": self.cpu,
            "cuda": list(self.cuda),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """The state that `to_plain` returned.

        Raises:
            ConfigurationError: It is none.

        Example:
            >>> state = RandomState.from_plain(RandomState.capture().to_plain())
            >>> first = random.random()
            >>> state.restore()
            >>> random.random() == first
            True
        """
        try:
            version, internal, next_gauss = plain["python"]
            kind, keys, position, has_gauss, gauss = plain["numpy"]
            state = cls(
                # As numbers, since Python's generator takes anything, and gives it out again.
                python=(version, tuple(map(index, internal)), None if next_gauss is None else float(next_gauss)),
                numpy=(kind, keys.numpy().astype(np.uint32), index(position), index(has_gauss), float(gauss)),
                cpu=plain["cpu"],
                cuda=tuple(plain["cuda"]),
            )
            state._check()
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigurationError(f"This is no state of the random generators: {error}") from error
        return state

    def _check(self) -> None:
        """Tries the state out on generators of its own."""
        random.Random().setstate(self.python)
        np.random.RandomState().set_state(self.numpy)
        torch.Generator().set_state(self.cpu)
        if any(state.dtype is not torch.uint8 for state in self.cuda):
            raise TypeError("a state of a CUDA generator is a tensor of bytes")
