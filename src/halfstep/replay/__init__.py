"""A training step replayed: what is wrong with it, told by experiments."""

from halfstep.replay.examination import Circumstances, Examination
from halfstep.replay.findings import Finding
from halfstep.replay.reporting import diagnosis_of
from halfstep.replay.runs import Replay, Run, StepCode
from halfstep.replay.verification import Course

__all__ = ["Circumstances", "Course", "Examination", "Finding", "Replay", "Run", "StepCode", "diagnosis_of"]
