"""What a policy does to a task: which override decides about each module, and what the casts are."""

from halfstep.coverage.arguments import NamedPolicy, check_policy_first, rehearsal_of, settle_device, told_apart
from halfstep.coverage.effects import describe_policy, policy_effect
from halfstep.coverage.steps import run_step

__all__ = [
    "NamedPolicy",
    "check_policy_first",
    "describe_policy",
    "policy_effect",
    "rehearsal_of",
    "run_step",
    "settle_device",
    "told_apart",
]
