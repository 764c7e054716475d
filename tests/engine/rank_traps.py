"""What torch's own loop does on two ranks where it is not enough, and what the engine does in its place. Each runs on every rank."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep import LossScaler, MixedPrecision
from halfstep.errors import HalfstepWarning

INF = math.inf


def _engine(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> MixedPrecision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        return MixedPrecision(model, optimizer, "fp16", scaler=scaler)


def left_alone(rank: int) -> dict[str, Any]:
    """A parameter that DistributedDataParallel ignores overflows on rank 1: the scale afterwards, and whether the step was skipped."""

    def make() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 2))
        extra = nn.Parameter(torch.ones(()))
        net.add_module("extra", nn.ParameterList([extra]))
        net.forward = net[0].forward  # type: ignore[method-assign]
        net._ddp_params_and_buffers_to_ignore = ["extra.0"]  # type: ignore[assignment]
        model = DistributedDataParallel(net)
        return model, extra, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, extra: nn.Parameter) -> Tensor:
        out: Tensor = model(torch.ones(1, 2)).mean()
        return out + extra * (INF if rank else 1.0)

    model, extra, optimizer = make()
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain.scale(loss(model, extra)).backward()  # type: ignore[no-untyped-call]
    before = extra.item()
    plain.step(optimizer)
    plain.update()
    found: dict[str, Any] = {"torch": (plain.get_scale(), extra.item() == before)}
    model, extra, optimizer = make()
    scaler = LossScaler(init_scale=8.0)
    record = _engine(model, optimizer, scaler).train_step(lambda: loss(model, extra))
    found["halfstep"] = (scaler.get_scale(), record.skipped)
    return found


def replicated_before_sharded(rank: int) -> dict[str, Any]:
    """A replicated parameter stands before a sharded one whose part on rank 1 overflows; and a plain one stands beside a sharded one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def parameter(placement: Any) -> nn.Parameter:
        value = torch.ones(2)
        return nn.Parameter(value if placement is None else distribute_tensor(value, mesh, [placement]))

    def make(first: Any) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        model = nn.ParameterList([parameter(first), parameter(Shard(0))])
        return model, torch.optim.SGD([{"params": [each]} for each in model], lr=0.5)

    def loss(model: nn.ParameterList) -> Tensor:
        parts = [(each.to_local() if isinstance(each, DTensor) else each).sum() for each in model]
        return parts[0] + parts[1] * (INF if rank else 1.0)

    def taken(model: nn.ParameterList) -> bool:
        first = model[0]
        return bool(((first.to_local() if isinstance(first, DTensor) else first) != 1).any())

    found: dict[str, Any] = {}
    model, optimizer = make(Replicate())
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain.scale(loss(model)).backward()  # type: ignore[no-untyped-call]
    plain.step(optimizer)
    found["torch"] = taken(model)
    model, optimizer = make(Replicate())
    record = _engine(model, optimizer, LossScaler(init_scale=8.0)).train_step(lambda: loss(model))
    found["halfstep"] = (taken(model), record.skipped)
    model, optimizer = make(None)
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain.scale(loss(model)).backward()  # type: ignore[no-untyped-call]
    try:
        plain.step(optimizer)
        found["torch, beside a plain one"] = "no error"
    except RuntimeError as error:
        found["torch, beside a plain one"] = str(error)
    model, optimizer = make(None)
    record = _engine(model, optimizer, LossScaler(init_scale=8.0)).train_step(lambda: loss(model))
    found["halfstep, beside a plain one"] = (taken(model), record.skipped)
    return found


def first_fsdp(rank: int) -> dict[str, Any]:
    """The scaler of the first FSDP swaps two arguments, and makes infinity of a half loss."""
    scaler = ShardedGradScaler("cpu", 8.0, 0.25, 3.0)
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    found: dict[str, Any] = {
        "torch": (scaler.get_backoff_factor(), ShardedGradScaler("cpu", 65536.0).scale(loss).item()),
        "halfstep": LossScaler("cpu").scale(loss).item(),
    }
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    try:
        _engine(model, torch.optim.SGD(model.parameters()), LossScaler())
        found["engine"] = "no error"
    except ValueError as error:
        found["engine"] = str(error)
    return found


def other_state(rank: int) -> dict[str, Any]:
    """The scalers of two ranks begin in different states."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.amp.GradScaler("cpu", init_scale=8.0 if rank else 4.0)
    for _ in range(3):
        optimizer.zero_grad()
        plain.scale(model(torch.ones(1, 2)).mean()).backward()
        plain.step(optimizer)
        plain.update()
    found: dict[str, Any] = {"torch": plain.get_scale()}
    amp = _engine(model, optimizer, LossScaler(init_scale=8.0 if rank else 4.0))
    try:
        amp.train_step(lambda: model(torch.ones(1, 2)).mean())
        found["halfstep"] = "no error"
    except RuntimeError as error:
        found["halfstep"] = f"{type(error).__name__}: {error}"
    return found


def other_policy(rank: int) -> dict[str, Any]:
    """The policies of two ranks differ; and with one policy, the loss of two ranks is that of one."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    x = torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = MixedPrecision(model, optimizer, "bf16; 0=fp32; op:linear=fp32")
    alone = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    alone.load_state_dict(model.module.state_dict())
    single = MixedPrecision(alone, torch.optim.SGD(alone.parameters(), lr=0.1), "bf16; 0=fp32; op:linear=fp32")
    found: dict[str, Any] = {
        "together": [same.train_step(lambda: model(x).square().mean()).loss for _ in range(3)],
        "alone": [single.train_step(lambda: alone(x).square().mean()).loss for _ in range(3)],
    }
    assert same.policy_handle is not None
    same.policy_handle.remove()
    amp = MixedPrecision(model, optimizer, "bf16; 0=fp32" if rank else "bf16")
    try:
        amp.train_step(lambda: model(x).mean())
        found["halfstep"] = "no error"
    except RuntimeError as error:
        found["halfstep"] = f"{type(error).__name__}: {error}"
    return found
