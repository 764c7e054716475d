"""Which precision each module and operation runs in, as a value and as a file."""

from halfstep.policy.application import PolicyHandle, attach_policy, check_no_policy
from halfstep.policy.matching import module_paths
from halfstep.policy.overrides import Override
from halfstep.policy.values import Policy

__all__ = ["Override", "Policy", "PolicyHandle", "attach_policy", "check_no_policy", "module_paths"]
