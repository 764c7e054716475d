"""What runs on each rank, for tests of gradients that `fully_shard` holds back while a run is stopped and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from halfstep.distributed import GradientSync, fsdp_policy
from halfstep.errors import HalfstepError

MICRO_BATCHES = 4

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": fsdp_policy("fp32"),
    "bf16": fsdp_policy("bf16"),
    "bf16, reduced in it": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "reduced in fp64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


class Block(nn.Module):
    """Uses one weight twice, has one that is frozen, one that is never used, and sizes that no number of ranks divides."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(3))
        self.recomputes = recomputes

    def part(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x))) * self.gain
        return result

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.frozen(checkpoint(self.part, x, use_reentrant=True) if self.recomputes else self.part(x))
        return x


def model(policy: str = "fp32", *, nested: bool = True, recomputes: bool = False, seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), Block(recomputes=recomputes), checkpoint_wrapper(Block(recomputes=False)), nn.Linear(5, 1))
    for block in (net[1], net[2]) if nested else ():
        fully_shard(block, mp_policy=POLICIES[policy], **settings)
    fully_shard(net, mp_policy=POLICIES[policy], **settings)
    return net


def micro_batch(number: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def backward(net: nn.Module, number: int) -> None:
    net(micro_batch(number)).float().square().mean().backward()


def bits(net: nn.Module) -> dict[str, Any]:
    """The gradients on this rank, exactly."""
    return {
        name: None if parameter.grad is None else parameter.grad.to_local().view(torch.uint8).tolist()  # type: ignore[attr-defined]
        for name, parameter in net.named_parameters()
    }


def finished(net: nn.Module, sync: GradientSync, *, first: int, flushes: bool) -> dict[str, Any]:
    """The rest of the micro-batches, and what they come to."""
    for number in range(first, MICRO_BATCHES):
        if number == MICRO_BATCHES - 1 and not flushes:
            sync.release()
        backward(net, number)
    if flushes:
        sync.reduce_held(net.parameters())
    return bits(net)


def resumed(make: Callable[..., nn.Module], *, stopped_after: int, flushes: bool) -> tuple[bool, int]:
    """Whether a run that stopped in the middle comes to what one comes to that did not, bit for bit; and what was held back then."""
    expected = []
    for _ in range(2):
        net = make()
        sync = GradientSync(net)
        sync.hold()
        expected.append(finished(net, sync, first=0, flushes=flushes))
    assert expected[0] == expected[1]

    old = make()
    sync = GradientSync(old)
    sync.hold()
    for number in range(stopped_after):
        backward(old, number)
    assert all(each is None for each in bits(old).values())
    held = {name: gradient.clone() for name, gradient in sync.held_back().items()}
    for gradient in sync.held_back().values():
        gradient.fill_(torch.nan)

    fresh = make()
    sync = GradientSync(fresh)
    assert sync.held_back() == {}
    sync.hold()
    sync.hold_back(held)
    found = sync.held_back()
    assert found.keys() == held.keys()
    for name, gradient in held.items():
        assert gradient.dtype is found[name].dtype
        assert torch.equal(found[name], gradient)
        assert found[name].data_ptr() != gradient.data_ptr()
    return finished(fresh, sync, first=stopped_after, flushes=flushes) == expected[0], len(held)


def all_kinds(rank: int) -> dict[str, tuple[bool, int]]:
    found = {}
    for policy, kept, nested in product(POLICIES, (True, False), (True, False)):
        for stopped_after, flushes in ((1, False), (2, True)):

            def make(policy: str = policy, kept: bool = kept, nested: bool = nested) -> nn.Module:
                return model(policy, nested=nested, reshard_after_forward=not kept)

            name = f"{policy}, kept whole: {kept}, nested: {nested}, after {stopped_after}, flushed: {flushes}"
            found[name] = resumed(make, stopped_after=stopped_after, flushes=flushes)
    return found


def shared() -> nn.Module:
    """Two modules in one group, one of which the model holds twice."""
    torch.manual_seed(0)
    twice, other = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.Sequential(twice, nn.Tanh(), other, twice, nn.Linear(4, 1))
    fully_shard([twice, other])
    fully_shard(net)
    return net


def other_kinds(rank: int) -> dict[str, tuple[bool, int]]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    kinds: dict[str, Callable[[], nn.Module]] = {
        "shared": shared,
        "replicated": partial(model, "bf16", mesh=grid),
        "two dimensions": partial(in_two_dimensions, grid),
        "recomputed": partial(model, "fp32", recomputes=True),
        "inside another": lambda: nn.Sequential(nn.Identity(), model()),
    }
    found = {}
    for name, make in kinds.items():
        for stopped_after in (1, MICRO_BATCHES):  # after the last nothing runs any more before the gradients are reduced
            found[f"{name}, after {stopped_after}"] = resumed(make, stopped_after=stopped_after, flushes=stopped_after == MICRO_BATCHES)
    return found


def in_two_dimensions(grid: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Spread by tensor parallelism in one dimension of a grid and by `fully_shard` in the other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if sequence:
        plan["3"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(net, grid["shards"], plan)
    fully_shard(net, mesh=grid["replicas"])
    return net


def refused(rank: int) -> dict[str, str]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = in_two_dimensions(grid, sequence=True)
    sync = GradientSync(net)
    sync.hold()
    backward(net, 0)
    found = {"sum": message(sync.held_back)}
    net = model()
    sync = GradientSync(net)
    found["name"] = message(lambda: sync.hold_back({"0.weight": torch.ones(5, 4), "0.mistake": torch.ones(2)}))
    found["shape"] = message(lambda: sync.hold_back({"0.weight": torch.ones(4, 5)}))
    found["plain"] = message(lambda: GradientSync(nn.Linear(1, 1)).hold_back({"weight": torch.ones(1, 1)}))
    assert sync.held_back() == {}
    sync.hold_back({})
    return found


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def names(rank: int) -> list[set[str]]:
    """What is held back in a model as it is, in wrappers, and after a pass that left parameters gathered."""
    plain = model(nested=False)
    compiled: Any = torch.compile(model(nested=False), backend="eager")
    part = nn.Sequential(nn.Identity(), model(nested=True, reshard_after_forward=False))
    wholes: list[tuple[nn.Module, nn.Module]] = [(plain, plain), (compiled, compiled), (nn.ModuleDict({"a": part}), part)]
    found = []
    for whole, runs in wholes:
        sync = GradientSync(whole)
        sync.hold()
        backward(runs, 0)
        held = sync.held_back()
        assert held.keys() <= dict(whole.named_parameters()).keys()
        found.append(set(held))
        sync.forget()
        assert sync.held_back() == {}
    return found
