"""One training step, looked at op by op: what runs lowered, what does not and why, and how much range is left."""

from halfstep.audit.steps import audit_task

__all__ = ["audit_task"]
