"""The region of a forward pass: autocast in an engine's precision, and the end of a step that breaks off in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from halfstep.policy import DTYPES
from halfstep.records import Precision

__all__ = ["Region"]


@final
class Region(torch.autocast):
    """An autocast region that says when an exception leaves it.

    Args:
        device_type: Of the model.
        precision: The engine's; with fp32 autocast is switched off.
        on_error: Called when an exception leaves the region; `None` for an evaluation.

    Example:
        >>> with Region("cpu", precision="bf16", on_error=None):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """

    def __init__(self, device_type: str, *, precision: Precision, on_error: Callable[[], None] | None) -> None:
        super().__init__(device_type, dtype=None if precision == "fp32" else DTYPES[precision], enabled=precision != "fp32")
        self._on_error = on_error

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        """Ends the region, and the step with it if there was an exception."""
        result = super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is not None and self._on_error is not None:
            self._on_error()
        return result
