"""What a loop does with gradients that are still multiplied with the loss scale."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final, final

import torch
from torch import Tensor

from halfstep._torch import WatchingMode, insert_mode, kept_out_of_graphs, remove_mode
from halfstep._torch.dispatching import DispatchMode
from halfstep.watching.lines import NOWHERE, Line, line_above
from halfstep.watching.states import OptimizerState

__all__ = ["GradientWindow"]

# What measures how large a gradient is, and what limits it.
_MEASURING: Final = frozenset({"linalg_vector_norm", "norm", "_foreach_norm", "pow", "square", "_foreach_pow", "dot", "vdot", "std", "var"})
_LIMITING: Final = frozenset({"clamp", "clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_", "clip_"})
# What a gradient is multiplied with is a limit where its size was measured before; otherwise it may be a mean over ranks.
_MULTIPLYING: Final = frozenset({"mul_", "div_", "_foreach_mul_", "_foreach_div_"})
# What is a gradient still, in other memory.
_CARRYING: Final = frozenset({"cat", "stack", "clone", "_to_copy", "abs"})


@final
class GradientWindow(WatchingMode):  # type: ignore[no-untyped-call]
    """Looks at the operations between the backward pass of a scaled loss and what unscales its gradients.

    Args:
        state: The optimizer whose gradients they are.
        gradients: They.
        scale: In words, what they are multiplied with.
    """

    def __init__(self, state: OptimizerState, gradients: list[Tensor], *, scale: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self._places = {each.data_ptr() for each in gradients if each.layout is torch.strided and type(each) is Tensor}
        self._carried: list[Tensor] = []  # Kept, so that nothing else comes to lie where they do.
        self._scale = scale
        self._measured: Line = NOWHERE
        self._limited: Line = NOWHERE

    def open(self) -> None:
        """Begins."""
        insert_mode(self, below=DispatchMode)

    def close(self) -> None:
        """Ends it, in the thread that began it."""
        remove_mode(self)

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes in an operation, and runs it."""
        name = func.__name__.partition(".")[0]
        if self._limited is NOWHERE and name in _MEASURING | _LIMITING | _MULTIPLYING and self._concerns(args):
            frame = inspect.currentframe()
            if name in _MEASURING:
                self._measured = line_above(frame) if self._measured is NOWHERE else self._measured
            elif name in _LIMITING or self._measured is not NOWHERE:
                self._limited = line_above(frame)
            del frame
        result = func(*args, **(kwargs or {}))
        if name in _CARRYING and isinstance(result, Tensor) and self._concerns(args):
            self._carried.append(result)
            self._places.add(result.data_ptr())
        return result

    def _concerns(self, args: Any) -> bool:
        given = args[0] if args else None
        tensors = given if isinstance(given, list | tuple) else [given]
        return any(isinstance(each, Tensor) and type(each) is Tensor and each.data_ptr() in self._places for each in tensors)

    def findings(self) -> Iterator[tuple[str, Line, str]]:
        """Rule, line and what was seen."""
        if self._limited is not NOWHERE:
            yield "clip_before_unscale", self._limited, f"Gradients that are multiplied with {self._scale} are limited here."
        elif self._measured is not NOWHERE:
            yield "scaled_norm_logged", self._measured, f"The size of gradients is computed while they are multiplied with {self._scale}."
