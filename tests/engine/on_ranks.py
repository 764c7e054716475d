"""What runs on each of two ranks, for tests of an engine that trains with others."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import LossScaler, MixedPrecision
from halfstep.distributed import fsdp_policy
from halfstep.errors import HalfstepError, HalfstepWarning

INF = math.inf


class Collectives(TorchDispatchMode):
    """Counts the reductions that run while it is active, by their number of elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in str(func) and "c10d" in str(func):
            first = args[0]
            tensors: Sequence[Any] = first if isinstance(first, list | tuple) else [first]
            self.sizes.append(sum(each.numel() for each in tensors if isinstance(each, Tensor)))
        return func(*args, **(kwargs or {}))


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def placed(kind: str, net: nn.Module, *, policy: str = "fp32") -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh, mp_policy=fsdp_policy(policy))
    return net


def engine(model: nn.Module, precision: str = "fp16", **settings: Any) -> MixedPrecision:
    fused = settings.pop("fused", False)
    if precision == "fp16":  # At 65536 the first step of these nets overflows.
        settings.setdefault("scaler", LossScaler(init_scale=1024.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), precision, **settings)


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def values(model: nn.Module) -> list[list[float]]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist() for p in model.parameters()]


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def take(amp: MixedPrecision, x: Tensor, factor: float = 1.0) -> Any:
    return amp.train_step(lambda x: amp.model(x).pow(2).mean() * factor, x)


def mixed_placements(rank: int, order: str, fused: bool) -> list[tuple[list[bool], bool]]:
    """Plain (p), replicated (r) and sharded (s) parameters in one optimizer, in some order; each overflows in turn on rank 1 alone."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for guilty in order:
        torch.manual_seed(0)
        model = nn.Module()
        for kind in order:
            value: Any = torch.ones(4)
            if kind != "p":
                value = distribute_tensor(value, mesh, [Replicate() if kind == "r" else Shard(0)])
            model.register_parameter(kind, nn.Parameter(value))
        # torch's own step takes tensors of one sort at a time.
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=fused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)
            amp = MixedPrecision(model, optimizer, "fp16", scaler=LossScaler(init_scale=8.0), max_grad_norm=10.0)
        records = []
        unchanged = True
        for step in range(3):
            before = [_local(parameter).clone() for parameter in model.parameters()]

            def loss(step: int = step, guilty: str = guilty, model: nn.Module = model) -> Tensor:
                parts = []
                for kind in order:
                    local = getattr(model, kind)
                    part = (local.to_local() if isinstance(local, DTensor) else local).sum()
                    parts.append(part * (INF if step == 1 and kind == guilty and rank == 1 else 1.0))
                return torch.stack(parts).sum()

            records.append(amp.train_step(loss))
            if step == 1:
                unchanged = all(torch.equal(old, _local(new)) for old, new in zip(before, model.parameters(), strict=True))
        found.append(([record.skipped for record in records], unchanged and amp.stats().skips == 1))
    return found


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def leave_one_alone(net: nn.Module) -> nn.Parameter:
    """A new parameter of a net, which DistributedDataParallel does not reduce. (It finds no name of the outermost module to ignore.)"""
    extra = nn.Parameter(torch.ones(()))
    net.add_module("extra", nn.ParameterList([extra]))
    net.forward = nn.Sequential(*list(net.children())[:-1]).forward
    net._ddp_params_and_buffers_to_ignore = ["extra.0"]  # type: ignore[assignment]
    return extra


def ignored_parameter(rank: int, fused: bool) -> tuple[list[bool], list[float]]:
    """A parameter that DistributedDataParallel leaves alone overflows on one rank."""
    net = make_net()
    extra = leave_one_alone(net)
    amp = engine(DistributedDataParallel(net), fused=fused)

    def loss(x: Tensor, factor: float) -> Tensor:
        out: Tensor = amp.model(x).pow(2).mean() + extra * factor
        return out

    records = []
    for step in range(4):
        factor = INF if step == 2 and rank == 1 else 1.0
        records.append(amp.train_step(lambda x, factor=factor: loss(x, factor), batch(rank, step)))
    return [record.skipped for record in records], [record.scale for record in records]


def different_scalers(rank: int) -> dict[str, str]:
    """Scalers that differ from rank to rank: from the start, after a load on all ranks, after a load on one rank."""
    found = {}
    amp = engine(placed("ddp", make_net()), scaler=LossScaler(init_scale=8.0 * (rank + 1)))
    found["start"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()), scaler=LossScaler(growth_interval=10 + rank))
    found["settings"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()), scaler=LossScaler(init_scale=8.0))
    take(amp, batch(rank))
    state = amp.state_dict()
    amp.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 8.0 * (rank + 1)}})
    found["load"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()), scaler=LossScaler(init_scale=8.0))
    take(amp, batch(rank))
    if rank == 0:
        amp.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 4.0}})
    found["one load"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()), scaler=LossScaler(init_scale=8.0))
    take(amp, batch(rank))
    if rank:
        amp.load_state_dict({**state, "scaler": {**state["scaler"], "_growth_tracker": 5}})
    found["tracker"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()), scaler=torch.amp.GradScaler("cpu", init_scale=8.0 * (rank + 1)))
    found["torch"] = message(lambda: take(amp, batch(rank)))
    amp = engine(placed("ddp", make_net()))
    found["same"] = message(lambda: take(amp, batch(rank)))
    return found


def reductions(rank: int, kind: str) -> dict[str, Any]:
    """How often gradients are reduced in a step of four micro-batches, and what a partial group gives."""
    whole, group = engine(placed(kind, make_net())), engine(placed(kind, make_net()), accumulate=4)
    data = [batch(rank, number) for number in range(6)]
    found: dict[str, Any] = {}
    for name, amp, batches in (("whole", whole, [torch.cat(data[:4])]), ("group", group, data[:4])):
        with Collectives() as collectives:
            for x in batches:
                with amp.autocast():
                    loss = amp.model(x).pow(2).mean()
                amp.backward(loss)
                amp.step()
        found[name] = [size for size in collectives.sizes if size > 8]  # The verdict is reduced, too.
    # The last two micro-batches are a group of their own: by flush(), and by a loader whose end is known.
    found["flushed"] = _partial(kind, data, known=False)
    found["known"] = _partial(kind, data, known=True)
    by_hand = engine(placed(kind, make_net()), accumulate=2)
    for x in data[4:]:
        with by_hand.autocast():
            loss = by_hand.model(x).pow(2).mean()
        by_hand.backward(loss)
        by_hand.step()
    found["by hand"] = values(by_hand.model)
    return found


def _partial(kind: str, data: list[Tensor], *, known: bool) -> list[list[float]]:
    amp = engine(placed(kind, make_net()), accumulate=4)
    for x in amp.micro_batches(data[4:]) if known else data[4:]:
        with amp.autocast():
            loss = amp.model(x).pow(2).mean()
        amp.backward(loss)
        record = amp.step()
        assert (record is None) or known
    assert (amp.flush() is None) == known
    return values(amp.model)


def _go_on_after(
    fail: Callable[[Tensor], Tensor], *, fresh: MixedPrecision, amp: MixedPrecision, rank: int
) -> tuple[list[list[float]], list[list[float]]]:
    """What two engines come to from here, the second after two steps that ran out of memory."""
    for _ in range(2):
        with contextlib.suppress(torch.OutOfMemoryError):
            amp.train_step(fail, batch(rank, 8))
    for each in (fresh, amp):
        for number in range(2):
            take(each, batch(rank, number))
    return values(fresh.model), values(amp.model)


def broken_off(rank: int, kind: str) -> tuple[list[list[float]], list[list[float]]]:
    """A step that breaks off after some micro-batches leaves nothing in the next one."""
    fresh, amp = engine(placed(kind, make_net()), accumulate=2), engine(placed(kind, make_net()), accumulate=2)
    with amp.autocast():
        loss = amp.model(batch(rank, 7)).pow(2).mean()
    amp.backward(loss)

    def fail(x: Tensor) -> Tensor:
        amp.model(x)
        raise torch.OutOfMemoryError("in the forward pass")

    amp.driver.abandon()
    return _go_on_after(fail, fresh=fresh, amp=amp, rank=rank)


def first_fsdp(rank: int) -> str:
    model = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    return message(lambda: engine(model))


def without_gradients(rank: int) -> tuple[list[bool], tuple[int, int]]:
    """The optimizer of one rank never has a gradient: it takes part in the verdict all the same."""
    net = make_net()
    extra = leave_one_alone(net)
    model = DistributedDataParallel(net)
    amp = MixedPrecision(model, torch.optim.SGD([extra], lr=0.1), "fp16", scaler=LossScaler(init_scale=1024.0))

    def loss(x: Tensor, factor: float) -> Tensor:
        out: Tensor = model(x).pow(2).mean()
        return out + extra * factor if rank else out

    records = [amp.train_step(loss, batch(rank, step), INF if step == 1 else 1.0) for step in range(3)]
    return [record.skipped for record in records], (amp.stats().steps, amp.stats().skips)


def policies(rank: int) -> dict[str, tuple[list[float], list[bool]]]:
    """fully_shard with the policy of each precision trains and agrees."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        amp = engine(placed("fsdp2", make_net(), policy=precision), precision, max_grad_norm=1.0, fused=True)
        records = [take(amp, batch(rank, 0), INF if step == 2 and rank == 0 else 1.0) for step in range(6)]
        found[precision] = ([record.loss for record in records], [record.skipped for record in records])
    return found


def different_setups(rank: int) -> dict[str, str]:
    """Engines that are not the same on all ranks."""
    found = {}

    def first_step(name: str, precision: str = "fp16", **settings: Any) -> None:
        amp = engine(placed("ddp", make_net()), precision, **settings)
        found[name] = message(lambda: take(amp, batch(rank)))

    first_step("precision", "fp16" if rank else "bf16")
    first_step("static scales", scaler=LossScaler(init_scale=2.0 ** (4 + 3 * rank), static=True))
    first_step("static", scaler=LossScaler(init_scale=8.0, static=bool(rank)))
    first_step("clipping", "bf16", max_grad_norm=1.0 + rank)
    first_step("accumulation", "bf16", accumulate=1 + rank)
    return found


def changed_later(rank: int) -> dict[str, Any]:
    """With a fused optimizer, whose verdict stays on the device, the scale of one rank is changed after some steps."""
    amp = engine(placed("ddp", make_net()), fused=True)
    for number in range(3):
        take(amp, batch(rank, number))
    assert amp.scaler is not None
    if rank:
        amp.scaler.update(64.0)
    before = values(amp.model)
    record = take(amp, batch(rank, 3))
    found: dict[str, Any] = {"skipped": record.skipped, "same": values(amp.model) == before, "steps": 1, "told": ""}
    while found["steps"] < 60 and "RanksDisagreeError" not in found["told"]:
        found["told"] = message(lambda: take(amp, batch(rank, 4)))
        found["steps"] += 1
    return found


def uneven(rank: int, precision: str) -> list[list[float]]:
    """The last group of one rank is shorter than that of the other."""
    amp = engine(placed("ddp", make_net()), precision, accumulate=4, max_grad_norm=1.0)
    for _ in range(2):
        for x in amp.micro_batches([batch(rank, number) for number in range(7 + rank)]):
            with amp.autocast():
                loss = amp.model(x).pow(2).mean()
            amp.backward(loss)
            amp.step()
    return values(amp.model)


def different_gradients(rank: int, kind: str) -> tuple[list[list[float]], float]:
    """Gradients that the ranks see differently, beside others that all share: what becomes of those, and the norm."""
    torch.manual_seed(0)
    shared, own = nn.Linear(4, 4), nn.Linear(4, 2)
    model: nn.Module = nn.Sequential(shared, own)
    if kind == "ignored":
        model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]  # type: ignore[assignment]
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "data"))
        fully_shard(shared, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(own, mesh=mesh["data"])
    amp = engine(model, "bf16", max_grad_norm=0.05)
    for number in range(3):
        record = take(amp, batch(rank, number))
    return values(shared), record.grad_norm


def clipped_by_value(rank: int, kind: str) -> tuple[list[list[float]], list[list[float]]]:
    """Clamped gradients, through the engine and by hand."""
    amp = engine(placed(kind, make_net()), "fp32", max_grad_value=0.01)
    by_hand = placed(kind, make_net())
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    for number in range(3):
        take(amp, batch(rank, number))
        optimizer.zero_grad()
        by_hand(batch(rank, number)).pow(2).mean().backward()
        for parameter in by_hand.parameters():
            assert parameter.grad is not None
            _local(parameter.grad).clamp_(-0.01, 0.01)
        optimizer.step()
    return values(amp.model), values(by_hand)


def broken_backward(rank: int, kind: str, accumulate: int) -> tuple[list[list[float]], list[list[float]]]:
    """An exception in the backward pass that reduces, on all ranks."""
    fresh, amp = (engine(placed(kind, make_net()), accumulate=accumulate) for _ in range(2))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise torch.OutOfMemoryError("in the backward pass")

    def fail(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss: Tensor = amp.model(Fails.apply(x)).pow(2).mean()  # type: ignore[no-untyped-call]
        return loss

    return _go_on_after(fail, fresh=fresh, amp=amp, rank=rank)


def after_validation(rank: int) -> list[float]:
    """A model under fully_shard is evaluated before its engine is made."""
    torch.manual_seed(0)
    net = make_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh, mp_policy=fsdp_policy("bf16"))
    fully_shard(net, mesh=mesh, mp_policy=fsdp_policy("bf16"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with torch.no_grad():
        net(batch(rank))
    amp = MixedPrecision(net, optimizer, "bf16")
    return [take(amp, batch(rank)).loss for _ in range(5)]


def joined(rank: int) -> str:
    model = placed("ddp", make_net())
    amp = engine(model, "bf16")
    assert isinstance(model, DistributedDataParallel)
    model._join_config = model._join_config._replace(enable=True)  # As inside of join(), whose own reductions would run after the error.
    return message(lambda: take(amp, batch(rank)))
