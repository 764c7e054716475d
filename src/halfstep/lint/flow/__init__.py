"""The order in which the parts of a training step happen, on every way through a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.lint.flow.events import BACKWARDS, Event, Guard, Kind, Target, Trace
from halfstep.lint.flow.paths import Walk
from halfstep.lint.flow.verdicts import Verdicts, asks_about_gradients, depends, line_of, receiver_of, written_scale, written_scaler

if TYPE_CHECKING:
    from halfstep.lint.module import Module

__all__ = [
    "BACKWARDS",
    "Event",
    "Guard",
    "Kind",
    "Target",
    "Trace",
    "Verdicts",
    "asks_about_gradients",
    "depends",
    "line_of",
    "receiver_of",
    "trace_module",
    "written_scale",
    "written_scaler",
]


def trace_module(module: Module) -> list[Trace]:
    """What happens on each way through each function of a file; nothing where no scaler and no autocast region is in it.

    A loop is gone through twice, so that what one iteration leaves behind is met by the next. Branches that make no difference to a
    training step are passed over; equal tests are answered alike on one way. Functions and methods of the file are followed where they
    are called.

    Args:
        module: The file.
    """
    return Walk(module).traces()
