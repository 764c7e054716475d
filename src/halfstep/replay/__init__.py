"""A training step replayed: what is wrong with it, told by experiments."""

from halfstep.replay.laboratory import Circumstances
from halfstep.replay.reporting import Outcome, diagnosis_of, examine_step, warning_text
from halfstep.replay.runs import Replay, StepCode
from halfstep.replay.verification import FURTHER, Course
from halfstep.replay.witnesses import finding_of_trace

__all__ = [
    "FURTHER",
    "Circumstances",
    "Course",
    "Outcome",
    "Replay",
    "StepCode",
    "diagnosis_of",
    "examine_step",
    "finding_of_trace",
    "warning_text",
]
