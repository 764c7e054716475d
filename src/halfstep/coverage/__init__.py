"""What a policy does to a task: which override decides about each module, and what the casts are."""

from halfstep.coverage.arguments import NamedPolicy, check_policy_first, told_apart
from halfstep.coverage.effects import describe_policy, policy_effect
from halfstep.coverage.steps import run_step

__all__ = ["NamedPolicy", "check_policy_first", "describe_policy", "policy_effect", "run_step", "told_apart"]
