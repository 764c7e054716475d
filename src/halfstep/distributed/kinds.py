"""Which modules and tensors are spread over ranks.

`torch.distributed.tensor` and `torch.distributed.fsdp` take most of a second to import, and a process that trains alone needs neither.
So they are looked up among the modules that are loaded already: where nobody imported them, nothing that they define can exist.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["data_parallel_modules", "dtensor_type", "fully_sharded_modules", "local_tensor", "wrapped_by_first_fsdp"]


def dtensor_type() -> type[DTensor] | None:
    """The class of distributed tensors; `None` where none can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    # The attribute is missing while the module is still being imported.
    return None if module is None else getattr(module, "DTensor", None)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing its memory; a plain tensor is its own. For use under `no_grad`."""
    kind = dtensor_type()
    return tensor.to_local() if kind is not None and isinstance(tensor, kind) else tensor


def data_parallel_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The model, or those of its submodules, that are wrapped in `DistributedDataParallel`; also inside `torch.compile`."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def fully_sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The model and those of its submodules that `fully_shard` was applied to."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def wrapped_by_first_fsdp(model: nn.Module) -> bool:
    """Whether the model or any submodule is wrapped in `FullyShardedDataParallel`, the first version of FSDP."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())
