"""A training step replayed: what is wrong with it, told by experiments."""

from halfstep.replay.examination import Circumstances
from halfstep.replay.reporting import Outcome, diagnosis_of, examine_step
from halfstep.replay.runs import Replay, StepCode
from halfstep.replay.verification import FURTHER, Course
from halfstep.replay.witnesses import finding_of_trace

__all__ = ["FURTHER", "Circumstances", "Course", "Outcome", "Replay", "StepCode", "diagnosis_of", "examine_step", "finding_of_trace"]
