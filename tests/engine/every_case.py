"""One training run in each of many set-ups, through the engine and by a loop written by hand with torch.amp.

The run has two parts that could be trained apart, `a` and `b`. They are trained by one optimizer, by two that step together, or by two
engines that share one loss scaler. Losses are made to overflow in chosen steps, on a chosen rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import LossScaler, MixedPrecision

STEPS = 6
INIT_SCALE = 1024.0
GROWTH_INTERVAL = 2
LR = 0.01
# Of each part: in which steps its loss overflows. A fused SGD that skips its very first step in torch's own loop reads momentum that was
# never written, so the first step is left alone.
OVERFLOWS = {"a": {1, 4}, "b": {1, 3}}

Optimizers = Literal["one", "together", "apart"]
Placement = Literal["alone", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Case:
    """A set-up."""

    fused: bool
    optimizers: Optimizers
    clip: bool
    accumulate: int
    scheduled: bool
    placement: Placement

    def __str__(self) -> str:
        words = [
            self.placement,
            "fused" if self.fused else "unfused",
            f"optimizers {self.optimizers}",
            "clip" if self.clip else "no clip",
            f"accumulate {self.accumulate}",
            "scheduled" if self.scheduled else "no schedule",
        ]
        return ", ".join(words)


@dataclass
class Run:
    """What a run did, step by step."""

    skips: list[dict[str, bool]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    untouched: list[bool] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, int] = (0, 0)


def cases(placement: Placement) -> list[Case]:
    """Every combination for a placement."""
    kinds: tuple[Optimizers, ...] = ("one", "together", "apart")
    return [
        Case(fused=fused, optimizers=optimizers, clip=clip, accumulate=accumulate, scheduled=scheduled, placement=placement)
        for fused, optimizers, clip, accumulate, scheduled in product((False, True), kinds, (False, True), (1, 4), (False, True))
    ]


def overflows(case: Case, step: int) -> dict[str, bool]:
    """Which parts are skipped in a step: those that step together are skipped together."""
    found = {part: step in OVERFLOWS[part] for part in "ab"}
    return found if case.optimizers == "apart" else dict.fromkeys("ab", any(found.values()))


class Setup:
    """Models, optimizers and schedulers of a case, fresh."""

    def __init__(self, case: Case, *, placement: Placement | None = None) -> None:
        placement = placement or case.placement
        torch.manual_seed(3)
        nets = {part: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for part in "ab"}
        parts = nn.ModuleDict(nets)
        self.whole: nn.Module = parts
        if case.optimizers == "apart":
            self.parts = {part: _placed(net, placement) for part, net in nets.items()}
        else:
            self.whole = _placed(Both(parts), placement)
            self.parts = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if case.optimizers == "one":
            self.optimizers["ab"] = torch.optim.AdamW(self.whole.parameters(), lr=LR, fused=case.fused)
        else:
            a, b = [*parts["a"].parameters()], [*parts["b"].parameters()]
            self.optimizers["a"] = torch.optim.AdamW(a, lr=LR, fused=case.fused)
            self.optimizers["b"] = (
                torch.optim.Adam(b, lr=LR, fused=case.fused)  # torch has no fused SGD for sharded parameters.
                if case.placement == "fsdp2"
                else torch.optim.SGD(b, lr=LR, momentum=0.9, fused=case.fused)
            )
        self.schedulers = {
            name: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if case.scheduled else None
            for name, optimizer in self.optimizers.items()
        }
        self.nets = parts

    def snapshot(self, names: Sequence[str]) -> Any:
        """Everything that a skipped step of these optimizers must not touch."""
        return copy.deepcopy(
            [
                (
                    [_local(parameter.detach()).clone() for group in self.optimizers[name].param_groups for parameter in group["params"]],
                    [
                        {key: _local(value) if isinstance(value, Tensor) else value for key, value in state.items()}
                        for state in self.optimizers[name].state_dict()["state"].values()
                    ],
                    self.optimizers[name].param_groups[0]["lr"],
                )
                for name in names
            ]
        )


class Both(nn.Module):
    """Both parts as one model."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.parts["a"](x), self.parts["b"](x)


def _placed(model: nn.Module, placement: Placement) -> nn.Module:
    if placement == "ddp":
        return DistributedDataParallel(model)
    if placement == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow, and of no use to one process
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batches(case: Case, step: int, *, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a step on a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(case.accumulate)]


def factors(case: Case, step: int, micro_batch: int, *, rank: int) -> dict[str, float]:
    """What the losses of the parts are multiplied by: infinity in one micro-batch of one rank, where a step is to overflow."""
    guilty = rank == (0 if case.placement == "alone" else step % 2)
    here = guilty and micro_batch == step % case.accumulate
    return {part: float("inf") if here and step in OVERFLOWS[part] else 1.0 for part in "ab"}


def loss_of(name: str, setup: Setup, batch: tuple[Tensor, Tensor], factor: dict[str, float]) -> Tensor:
    """The loss of one part, `a` or `b`, or of both, `ab`. It runs no model but its own: fully_shard would keep what was gathered for it."""
    x, y = batch
    if name in setup.parts:
        return F.cross_entropy(setup.parts[name](x), y) * factor[name]
    a, b = setup.whole(x)
    return F.cross_entropy(a, y) * factor["a"] + F.cross_entropy(b, y) * factor["b"]


def by_engine(case: Case, *, rank: int) -> Run:
    """The run through halfstep."""
    setup, run = Setup(case), Run()
    scaler = LossScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    names = ["a", "b"] if case.optimizers == "apart" else ["ab"]
    members = {"ab": list(setup.optimizers), "a": ["a"], "b": ["b"]}
    amps = {
        name: MixedPrecision(
            setup.parts.get(name, setup.whole),
            [setup.optimizers[member] for member in members[name]],
            "fp16",
            scaler=scaler,
            scheduler=[scheduler for member in members[name] if (scheduler := setup.schedulers[member]) is not None],
            max_grad_norm=1.0 if case.clip else None,
            accumulate=case.accumulate,
        )
        for name in names
    }
    for step in range(STEPS):
        expected = overflows(case, step)
        before = {name: setup.snapshot(members[name]) for name in names}
        records = {}
        for number, batch in enumerate(batches(case, step, rank=rank)):
            for name, amp in amps.items():
                with amp.autocast():
                    loss = loss_of(name, setup, batch, factors(case, step, number, rank=rank))
                amp.backward(loss)
                records[name] = amp.step()
        run.skips.append({part: records[name].skipped for name in names for part in name})  # type: ignore[union-attr]
        run.scales.append(records[names[0]].scale)  # type: ignore[union-attr]
        run.lrs.append(next(iter(setup.optimizers.values())).param_groups[0]["lr"])
        run.untouched += [equal(before[name], setup.snapshot(members[name])) for name in names if expected[name[0]]]
    run.parameters = {name: _full(parameter.detach()).clone() for name, parameter in setup.nets.named_parameters()}
    stats = scaler.stats()
    run.counts = (stats.steps, stats.skips)
    return run


def by_hand(case: Case, *, rank: int) -> Run:
    """The run by a loop written with torch.amp, for the placement of the case."""
    setup, run = Setup(case), Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    for step in range(STEPS):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        run.scales.append(scaler.get_scale())
        for number, batch in enumerate(batches(case, step, rank=rank)):
            factor = factors(case, step, number, rank=rank)
            for name in ["a", "b"] if case.optimizers == "apart" else ["ab"]:
                with _synced(setup.parts.get(name, setup.whole), last=number == case.accumulate - 1):
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = loss_of(name, setup, batch, factor)
                    scaler.scale(loss / case.accumulate).backward()  # type: ignore[no-untyped-call]
        for optimizer in setup.optimizers.values():
            scaler.unscale_(optimizer)
        clip(case, setup)
        skipped = overflows(case, step)
        for optimizer in setup.optimizers.values():
            # torch's loop would step one of two that step together where the gradients of the other overflow.
            if case.optimizers != "together" or not skipped["a"]:
                scaler.step(optimizer)
        for name, scheduler in setup.schedulers.items():
            if scheduler is not None and not skipped[name[0]]:
                scheduler.step()
        scaler.update()
        run.skips.append(skipped)
        run.lrs.append(next(iter(setup.optimizers.values())).param_groups[0]["lr"])
    run.parameters = {name: _full(parameter.detach()).clone() for name, parameter in setup.nets.named_parameters()}
    return run


def clip(case: Case, setup: Setup) -> None:
    """Clips the gradients of all optimizers that step together, as one vector."""
    if case.clip:
        for names in [["a"], ["b"]] if case.optimizers == "apart" else [list(setup.optimizers)]:
            groups = [group for name in names for group in setup.optimizers[name].param_groups]
            nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group["params"]], 1.0)


@contextlib.contextmanager
def _synced(model: nn.Module, *, last: bool) -> Iterator[None]:
    """A micro-batch whose gradients are reduced only if it is the last."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    reduce = getattr(model, "set_requires_gradient_sync", None)
    if reduce is not None:
        reduce(last)
    yield


def in_one_process(case: Case, *, size: int) -> dict[str, Tensor]:
    """The parameters after a run by hand in one process that sees the data of all ranks: the ranks' micro-batches are its own.

    It has no scaler: it skips the steps that are known to overflow.
    """
    setup = Setup(case, placement="alone")
    for step in range(STEPS):
        skipped = overflows(case, step)
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        for batch in [batch for rank in range(size) for batch in batches(case, step, rank=rank)]:
            with torch.autocast("cpu", dtype=torch.float16):
                each = [loss_of(name, setup, batch, {"a": 1.0, "b": 1.0}) for name in (setup.parts or ["ab"])]
            (torch.stack(each).sum() * INIT_SCALE / (case.accumulate * size)).backward()  # type: ignore[no-untyped-call]
        for parameter in setup.nets.parameters():
            assert parameter.grad is not None
            parameter.grad /= INIT_SCALE
        clip(case, setup)
        for name, optimizer in setup.optimizers.items():
            if not skipped[name[0]]:
                optimizer.step()
                if (scheduler := setup.schedulers[name]) is not None:
                    scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in setup.nets.named_parameters()}


def equal(first: Any, second: Any) -> bool:
    """Whether two nests hold the same, tensors to the bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def on_rank(rank: int, placement: Placement) -> list[tuple[Run, Run]]:
    """Each case of a placement through the engine and by hand, on one rank of several."""
    return [(by_engine(case, rank=rank), by_hand(case, rank=rank)) for case in cases(placement)]
