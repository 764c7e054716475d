"""The steps of a run as curves in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from halfstep.errors import ConfigurationError
from halfstep.journal import Entry
from halfstep.monitor.sinks.base import AbstractSink
from halfstep.records import Action, Alert, StepRecord

__all__ = ["TensorBoardSink"]

_CURVES: Final = ("loss", "scale", "skipped", "grad_norm", "lr", "step_time_s", "memory_bytes")


@final
class TensorBoardSink(AbstractSink):
    """Writes an event file of TensorBoard's: a curve for each number of a step, alerts and actions as texts.

    Where several optimizers take turns, each has curves of its own. Numbers that are not finite, or not known, are left out.

    Args:
        folder: The folder of the run.

    Raises:
        ConfigurationError: TensorBoard is not installed, or the file cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> TensorBoardSink(folder).close()
        >>> [path.name[:18] for path in folder.iterdir()]
        ['events.out.tfevent']
    """

    __slots__ = ("_writer",)

    def __init__(self, folder: Path) -> None:
        try:
            module = import_module("torch.utils.tensorboard")  # It loads torch, which nothing else here does.
        except ImportError as error:
            raise ConfigurationError(
                f"The sink 'tensorboard' needs TensorBoard, which cannot be loaded ({error}). Install it with "
                "`pip install 'halfstep[tensorboard]'`, or leave the sink out."
            ) from error
        try:
            self._writer: Any = module.SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigurationError(f"Cannot write to {folder}: {error.strerror or error}. Name another folder for the run.") from error

    def write(self, entries: Sequence[Entry]) -> None:
        """Writes points and texts."""
        for entry in entries:
            if isinstance(entry, StepRecord):
                self._write_step(entry)
            elif isinstance(entry, Alert):
                self._writer.add_text(f"alerts/{entry.rule}", str(entry), entry.step)
            elif isinstance(entry, Action):
                self._writer.add_text(f"actions/{entry.rule}", f"{entry.action}: {entry.message}", entry.step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write_step(self, record: StepRecord) -> None:
        group = f"{record.optimizer}/" if record.optimizer else ""
        for name in _CURVES:
            value = getattr(record, name)
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(f"{group}{name}", float(value), record.step)
