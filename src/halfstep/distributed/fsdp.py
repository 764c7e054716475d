"""Precision of what the ranks exchange: parameters and gradients of `fully_shard`, gradients of `DistributedDataParallel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError
from halfstep.precision import DTYPES, parse_precision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["compress_gradients", "fsdp_policy"]


def fsdp_policy(precision: str) -> MixedPrecisionPolicy:
    """The policy for `fully_shard(model, mp_policy=...)` in a precision.

    With bf16 and fp16, parameters are gathered and computed with in that type, while the sharded ones stay in fp32 and gradients are
    reduced in fp32. With fp32 nothing is cast.

    Args:
        precision: `fp32`, `bf16` or `fp16`.

    Raises:
        InvalidTypeError: `precision` is no string.
        ConfigurationError: It is no such name, or this build of torch has no `torch.distributed`.

    Example:
        >>> policy = fsdp_policy("bf16")
        >>> policy.param_dtype, policy.reduce_dtype
        (torch.bfloat16, torch.float32)
    """
    name = parse_precision(precision)
    if not dist.is_available():
        raise ConfigurationError(f"fsdp_policy({precision!r}): this build of torch has no torch.distributed, so there is no fully_shard.")
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 - slow to import

    if name == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[name], reduce_dtype=torch.float32)


def compress_gradients(model: DistributedDataParallel) -> None:
    """Lets a `DistributedDataParallel` model exchange its gradients in bf16, which halves what goes over the network.

    The sum over the ranks is rounded to bf16 (8 bits), too. Call it once, before the first backward pass. With gradient accumulation only
    the reducing pass is compressed.

    Args:
        model: The wrapped model.

    Raises:
        InvalidTypeError: It is anything but a `DistributedDataParallel`.
        StepOrderError: It has a communication hook already.

    Example:
        >>> import torch
        >>> compress_gradients(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        ...
        halfstep.errors.InvalidTypeError: compress_gradients takes a DistributedDataParallel model, not a Linear. ...
    """
    given: object = model
    if not isinstance(given, DistributedDataParallel):
        raise InvalidTypeError(
            f"compress_gradients takes a DistributedDataParallel model, not a {type(given).__name__}. Wrap the model first, "
            "and compile it afterwards. For fully_shard choose the reduce_dtype of its MixedPrecisionPolicy instead."
        )
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415 - not there in builds without distributed

    # torch refuses a hook of this name without NCCL or XCCL, although gloo sums bf16 as well. A lambda has another name, and no annotations
    # that torch would compare with its own.
    native = any(name in dist.get_backend_config(model.process_group) for name in ("nccl", "xccl"))
    torchs = default_hooks.bf16_compress_hook
    hook = torchs if native else lambda state, bucket: torchs(state, bucket)  # noqa: PLW0108 - for its name
    try:
        model.register_comm_hook(model.process_group, hook)
    except RuntimeError as error:
        raise StepOrderError(
            "compress_gradients: torch did not take the hook. A model takes one communication hook only, so call it once and without "
            f"register_comm_hook(). torch said: {error}"
        ) from error
