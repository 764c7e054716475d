"""Why training in low precision breaks, and what helps."""

from halfstep.diagnosis.diagnosing import diagnose

__all__ = ["diagnose"]
