from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.kinds import (
    data_parallel_modules,
    dtensor_type,
    fully_sharded_modules,
    local_tensor,
    wrapped_by_first_fsdp,
)


@pytest.mark.parametrize("loaded", [None, ModuleType("half_loaded")])
def test_what_is_not_loaded_does_not_exist(loaded: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        if loaded is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, loaded)
    tensor, model = torch.ones(2), nn.Linear(2, 2)
    assert dtensor_type() is None
    assert local_tensor(tensor) is tensor
    assert fully_sharded_modules(model) == []
    assert not wrapped_by_first_fsdp(model)


def test_distributed_modules_and_tensors_are_found(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415

    sharded, wrapped = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
    fully_shard(sharded[1])
    model = nn.ModuleList([wrapped, nn.Sequential(sharded)])
    assert data_parallel_modules(model) == [wrapped]
    sharded_modules: list[object] = [*fully_sharded_modules(model)]
    assert sharded_modules == [sharded[1]]
    assert not wrapped_by_first_fsdp(model)
    assert dtensor_type() is DTensor
    assert isinstance(sharded[1].weight, DTensor)
    part = torch.ones(3)
    with torch.no_grad():
        spread = DTensor.from_local(part, init_device_mesh("cpu", (1,)), [Replicate()])
        local_tensor(spread).mul_(2)
    assert part.tolist() == [2.0] * 3
