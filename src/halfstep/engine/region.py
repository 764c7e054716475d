"""The region of a forward pass: autocast as an engine's policy has it, and the end of a step that breaks off in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from halfstep.casting import Region, enter_table, leave_table, shielding_table

__all__ = ["StepRegion"]


@final
class StepRegion(torch.autocast):
    """An autocast region that says when an exception leaves it.

    Args:
        device_type: Of the model.
        region: The precision of the engine's policy; with fp32 autocast is switched off.
        on_error: Called when an exception leaves the region; `None` for an evaluation.

    Example:
        >>> with StepRegion("cpu", region=Region(precision="bf16"), on_error=None):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """

    def __init__(self, device_type: str, *, region: Region, on_error: Callable[[], None] | None) -> None:
        dtype = region.autocast_dtype
        super().__init__(device_type, dtype=dtype, enabled=dtype is not None)
        self._operations = region.operations
        self._on_error = on_error

    def __enter__(self) -> Any:
        """Begins the region."""
        self._table = self._operations or shielding_table()
        if self._table is not None:
            enter_table(self._table)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        """Ends the region, and the step with it if there was an exception."""
        result = super().__exit__(exc_type, exc_val, exc_tb)
        if self._table is not None:
            leave_table(self._table)
        if exc_type is not None and self._on_error is not None:
            self._on_error()
        return result
