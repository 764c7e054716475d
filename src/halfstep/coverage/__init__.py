"""What a policy does to a task: which override decides about each module, and what the casts are."""

from halfstep.coverage.arguments import NamedPolicy, read_policy_argument
from halfstep.coverage.effects import describe_policy, policy_effect

__all__ = ["NamedPolicy", "describe_policy", "policy_effect", "read_policy_argument"]
