"""The training step of mixed precision, in the right order."""

from halfstep.engine.guard import is_driven, times_driven
from halfstep.engine.mixed_precision import MixedPrecision
from halfstep.engine.recording import Recorder, step_observers

__all__ = ["MixedPrecision", "Recorder", "is_driven", "step_observers", "times_driven"]
