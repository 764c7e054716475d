"""A training step replayed: what is wrong with it, told by experiments."""

from halfstep.replay.batches import KeptBatch
from halfstep.replay.checks import all_finite
from halfstep.replay.inputs import nonfinite_tensors
from halfstep.replay.laboratory import Circumstances
from halfstep.replay.reporting import Outcome, diagnosis_of, diagnosis_of_trace, examine_step, examine_update, warning_text
from halfstep.replay.runs import Replay, StepCode, compute_step
from halfstep.replay.state import TrainingState
from halfstep.replay.verification import FURTHER, Course
from halfstep.replay.witnesses import open_trace

__all__ = [
    "FURTHER",
    "Circumstances",
    "Course",
    "KeptBatch",
    "Outcome",
    "Replay",
    "StepCode",
    "TrainingState",
    "all_finite",
    "compute_step",
    "diagnosis_of",
    "diagnosis_of_trace",
    "examine_step",
    "examine_update",
    "nonfinite_tensors",
    "open_trace",
    "warning_text",
]
