"""Random numbers that are drawn once and used again, in whatever precision: a kernel draws others in half precision than in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import DispatchMode, kept_out_of_graphs, schema_of

__all__ = ["Draws"]

# What draws other numbers for another dtype. Dropout does not: whether an element is kept is drawn in one way for all.
_NAMES: Final = (
    "bernoulli normal normal_ normal_functional uniform uniform_ exponential exponential_ geometric geometric_ cauchy cauchy_ log_normal "
    "log_normal_ random random_ rand rand_like randn randn_like multinomial binomial poisson _sample_dirichlet _standard_gamma"
)
_DRAWING: Final = frozenset(f"aten::{name}" for name in _NAMES.split())


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draw:
    """What was drawn, by which operation, and the state of the generator after it."""

    operation: Any
    values: Tensor
    state: Tensor | None


@final
class Draws:
    """The random numbers of one run of a step, for others to use.

    Example:
        >>> draws = Draws()
        >>> with draws.taken():
        ...     first = torch.randn(20, dtype=torch.float16)
        >>> with draws.given():
        ...     again = torch.randn(20)
        >>> bool((first == again).all())
        True
    """

    def __init__(self) -> None:
        self._made: list[_Draw] = []

    def taken(self) -> DispatchMode:
        """A context in which what is drawn is noted."""
        self._made.clear()
        return _DrawMode(self._take)

    def given(self) -> DispatchMode:
        """A context in which what was noted is drawn, in the same order, for as long as the same operations draw as many numbers."""
        waiting = iter(list(self._made))

        def give(operation: Any, result: Tensor, generator: torch.Generator | None) -> None:
            draw = next(waiting, None)
            if draw is None or draw.operation is not operation or draw.values.shape != result.shape:
                return
            result.copy_(draw.values)
            if draw.state is not None:
                (generator or torch.default_generator).set_state(draw.state)

        return _DrawMode(give)

    def _take(self, operation: Any, result: Tensor, generator: torch.Generator | None) -> None:
        state = (generator or torch.default_generator).get_state() if result.is_cpu else None
        self._made.append(_Draw(operation=operation, values=result.detach().clone(), state=state))


class _DrawMode(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, see: Callable[[Any, Tensor, torch.Generator | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and shows what it drew."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and schema_of(func).name in _DRAWING:
            self._see(func, result, next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None))
        return result
