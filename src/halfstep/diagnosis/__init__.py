"""Why training in low precision breaks, and what helps."""

from halfstep.diagnosis.diagnosing import diagnose
from halfstep.diagnosis.skips import SkipDiagnosis, diagnose_skips

__all__ = ["SkipDiagnosis", "diagnose", "diagnose_skips"]
