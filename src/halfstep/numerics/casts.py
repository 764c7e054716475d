"""How many casts between precisions a piece of work makes."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor
from typing_extensions import Self

from halfstep._torch import AfterEachCast

__all__ = ["CastCounter"]

_PRECISIONS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


@final
class CastCounter:
    """Counts the casts between fp32, bf16 and fp16 while it is open, forward and backward, whoever asks for them.

    A tensor that is converted by an operation of its own counts. What a kernel converts within itself does not, and neither do casts in
    compiled code, which are parts of other kernels.

    Attributes:
        casts: How many there were.
        elements: How many elements they have written.

    Example:
        >>> with CastCounter() as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        ...     out = torch.nn.functional.linear(torch.ones(1, 3), torch.ones(2, 3))
        >>> counter.casts, counter.elements
        (2, 9)
    """

    def __init__(self) -> None:
        self.casts = 0
        self.elements = 0
        self._mode = AfterEachCast(self._see)

    def __enter__(self) -> Self:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)  # type: ignore[no-untyped-call]

    def _see(self, source: Tensor, result: Tensor) -> None:
        if source.dtype in _PRECISIONS and result.dtype in _PRECISIONS:
            self.casts += 1
            self.elements += result.numel()
