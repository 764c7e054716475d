"""A training step replayed: what is wrong with it, told by experiments."""

from halfstep.replay.batches import KeptBatch
from halfstep.replay.inputs import nonfinite_tensors
from halfstep.replay.laboratory import Circumstances
from halfstep.replay.reporting import Outcome, diagnosis_of, examine_step, examine_update, warning_text
from halfstep.replay.runs import Replay, StepCode, compute_step
from halfstep.replay.state import TrainingState
from halfstep.replay.verification import FURTHER, Course
from halfstep.replay.witnesses import finding_of_trace

__all__ = [
    "FURTHER",
    "Circumstances",
    "Course",
    "KeptBatch",
    "Outcome",
    "Replay",
    "StepCode",
    "TrainingState",
    "compute_step",
    "diagnosis_of",
    "examine_step",
    "examine_update",
    "finding_of_trace",
    "nonfinite_tensors",
    "warning_text",
]
