"""Training on many ranks: who they are, norms over all of them, and when their gradients are reduced."""

from halfstep.distributed.fsdp import compress_gradients, fsdp_policy
from halfstep.distributed.norms import clip_, total_norm
from halfstep.distributed.ranks import Ranks, ranks_of
from halfstep.distributed.sync import GradientSync, gradients_agree

__all__ = ["GradientSync", "Ranks", "clip_", "compress_gradients", "fsdp_policy", "gradients_agree", "ranks_of", "total_norm"]
