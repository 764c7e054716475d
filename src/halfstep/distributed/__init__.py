"""Training on many ranks: who they are, norms over all of them, and when their gradients are reduced."""

from halfstep.distributed.fsdp import compress_gradients, fsdp_policy
from halfstep.distributed.kinds import dtensor_type, fully_sharded_modules, local_tensor
from halfstep.distributed.norms import clip_, total_norm
from halfstep.distributed.ranks import Ranks, ranks_of, replicated_parameters
from halfstep.distributed.sync import GradientSync, gradients_agree

__all__ = [
    "GradientSync",
    "Ranks",
    "clip_",
    "compress_gradients",
    "dtensor_type",
    "fsdp_policy",
    "fully_sharded_modules",
    "gradients_agree",
    "local_tensor",
    "ranks_of",
    "replicated_parameters",
    "total_norm",
]
