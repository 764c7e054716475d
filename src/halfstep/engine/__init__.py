"""The training step of mixed precision, in the right order."""

from halfstep.engine.buffers import is_expanded, is_writable
from halfstep.engine.guard import is_driven, times_driven
from halfstep.engine.mixed_precision import MixedPrecision
from halfstep.engine.progress import StepProgress, go_on_from, micro_batches_of, progress_of, state_of, trained_parameters
from halfstep.engine.recording import Recorder, step_observers

__all__ = [
    "MixedPrecision",
    "Recorder",
    "StepProgress",
    "go_on_from",
    "is_driven",
    "is_expanded",
    "is_writable",
    "micro_batches_of",
    "progress_of",
    "state_of",
    "step_observers",
    "times_driven",
    "trained_parameters",
]
