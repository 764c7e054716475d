"""The comparison of precisions on one task: time, memory, loss, verdict."""

from halfstep.comparison.measurement import compare

__all__ = ["compare"]
