"""What runs on each of two ranks, for tests of policies on models that train with others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from halfstep import Policy
from halfstep.distributed import fsdp_policy
from halfstep.policy import PolicyHandle


class Scores(nn.Module):
    """A layer with a softmax behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return torch.softmax(self.layer(values), -1)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), Scores(), nn.Linear(6, 2))


def placed(kind: str, net: nn.Sequential, *, precision: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net[2], net[3], net):
        fully_shard(part, mesh=mesh, mp_policy=fsdp_policy(precision))
    return net


def batches(alike: bool) -> list[Tensor]:
    """The batch of each rank."""
    parts = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return [parts[0], parts[0]] if alike else parts


def whole(tensor: Tensor) -> list[float]:
    values: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    result: list[float] = values.detach().float().flatten().tolist()
    return result


def taken(model: nn.Module, inputs: Tensor) -> tuple[float, list[list[float]]]:
    """The loss of a step, and the gradients."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    loss = outputs.float().square().mean()
    loss.backward()
    return loss.item(), [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def step(rank: int, kind: str, text: str, *, first: bool, alike: bool, precision: str = "fp32") -> dict[str, Any]:
    """A step on all ranks and one on this rank alone, with the batches of all."""
    policy = Policy.parse(text)
    inputs = batches(alike)
    alone = make_net()
    with policy.apply(alone):
        expected = taken(alone, inputs[0] if alike else torch.cat(inputs))

    net = make_net()
    handle: PolicyHandle | None = policy.apply(net) if first else None
    model = placed(kind, net, precision=precision)
    if handle is None:
        handle = policy.apply(model)
    seen: list[torch.dtype] = []
    net[2].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    loss, gradients = taken(model, inputs[rank])
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    keys = list(net.state_dict())
    handle.remove()
    names = [type(module).__name__ for module in net.modules()]
    return {
        "alone": expected,
        "together": (mean.item() / dist.get_world_size(), gradients),
        "island": str(seen),
        "keys": keys == list(alone.state_dict()),
        "names": names,
    }


def every_step(rank: int, kind: str, texts: list[str]) -> list[dict[str, Any]]:
    """Steps with policies, applied before and after the model is wrapped."""
    return [step(rank, kind, text, first=first, alike=alike) for text in texts for first in (True, False) for alike in (True, False)]


def gathered_in_half(rank: int, text: str) -> list[dict[str, Any]]:
    """Steps of a sharded model that gathers its weights in bf16."""
    return [step(rank, "fsdp2", text, first=first, alike=True, precision="bf16") for first in (True, False)]
