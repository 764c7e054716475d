"""Tensors on a CUDA device, over each sort of process group that training with one has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from halfstep.checkpoint.shards import read_shards, write_shards
from halfstep.distributed import GradientSync, fsdp_policy

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group(request.param, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_lies_on_a_device_comes_back(alone: None, tmp_path: Path) -> None:
    mesh = init_device_mesh("cuda", (1,))
    device = torch.device("cuda", 0)
    made = {
        "plain": torch.randn(3, 5, device=device),
        "large": torch.randn(3_000_000, device=device),
        "bf16": torch.randn(7, device=device).bfloat16(),
        "transposed": torch.randn(4, 6, device=device).t(),
        "sharded": DTensor.from_local(torch.randn(3, 5, device=device), mesh, [Shard(0)], run_check=False),
        "replicated": DTensor.from_local(torch.randn(3, device=device), mesh, [Replicate()], run_check=False),
        "host": torch.randn(2),
    }
    write_shards(made, tmp_path, group=dist.group.WORLD)
    targets = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    on_host = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in made.items()}
    read_shards(targets, tmp_path, group=dist.group.WORLD)
    read_shards(on_host, tmp_path, group=None)
    for name, tensor in made.items():
        mine, expected = (each.to_local() if isinstance(each, DTensor) else each for each in (targets[name], tensor))
        assert mine.device == expected.device
        assert torch.equal(mine, expected)
        assert torch.equal(on_host[name], expected.cpu())


@pytest.mark.parametrize("alone", ["nccl"], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_held_back(alone: None, precision: str) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).cuda()
        fully_shard(net[0], mp_policy=fsdp_policy(precision))
        fully_shard(net, mp_policy=fsdp_policy(precision))
        return net

    def backward(net: torch.nn.Module, number: int) -> None:
        net(torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).cuda()).float().square().mean().backward()

    nets = [model(), model()]
    for net in nets:
        sync = GradientSync(net)
        sync.hold()
        backward(net, 0)
    held = {name: gradient.cpu() for name, gradient in sync.held_back().items()}
    assert len(held) == 4
    nets[1] = model()
    sync = GradientSync(nets[1])
    sync.hold()
    sync.hold_back(held)
    found = []
    for net in nets:
        GradientSync(net).release()
        backward(net, 1)
        found.append([parameter.grad.to_local() for parameter in net.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
