"""What runs on each rank, for tests of runs of several ranks that are stopped and gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from halfstep import MixedPrecision
from halfstep.distributed import fsdp_policy
from tests.checkpoint.cases import engine, mlp
from tests.checkpoint.runs import Build, Facts, Run, batch, facts, sweep

__all__ = ["CASES", "STEPS", "interrupted"]

STEPS: Final = 20
LARGE: Final = (2, 3, 8, 14, 15)  # of both ranks together, in turns
INFINITE: Final = (5, 11, 26)


def placed(kind: str, model: nn.Module, **settings: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, **settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp_policy(settings.pop("policy", "fp32"))
    if isinstance(model, nn.Sequential) and settings.pop("nested", True):
        fully_shard(model[0], mesh=mesh, mp_policy=policy, **settings)
    fully_shard(model, mesh=mesh, mp_policy=policy, **settings)
    return model


def on_ranks(kind: str, precision: str, *, accumulate: int = 1, knows_end: bool = False, **settings: Any) -> Build:
    """A run of several ranks, each with batches and random numbers of its own."""

    def made() -> Run:
        model = placed(kind, mlp(), **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return loop(engine(model, optimizer, precision, scheduler=schedule, accumulate=accumulate), knows_end=knows_end)

    return made


def loop(amp: MixedPrecision, *, knows_end: bool) -> Run:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bad: dict[str, Sequence[int]] = {"large": LARGE} if amp.scaler is not None else {"infinite": INFINITE}
    begun: list[Any] = []

    def numbers(start: int) -> Any:
        if not begun:
            begun.append(amp.micro_batches(range(start, STEPS)) if knows_end else iter(range(start, STEPS)))
        return begun[0]

    def step(number: int) -> Facts:
        x, y = batch(ranks * next(numbers(number)) + rank, **bad)
        with amp.autocast():
            loss = F.mse_loss(amp.model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


CASES: Final[Mapping[str, Build]] = {
    "ddp fp32": on_ranks("ddp", "fp32"),
    "ddp bf16": on_ranks("ddp", "bf16"),
    "ddp fp16": on_ranks("ddp", "fp16"),
    "ddp fp16 accumulated": on_ranks("ddp", "fp16", accumulate=3),
    "ddp bf16 accumulated, known end": on_ranks("ddp", "bf16", accumulate=3, knows_end=True),
    "ddp fp16 accumulated, views": on_ranks("ddp", "fp16", accumulate=3, gradient_as_bucket_view=True),
    "ddp fp16, static graph": on_ranks("ddp", "fp16", static_graph=True),
    "ddp fp16 accumulated, own buffers": on_ranks("ddp", "fp16", accumulate=3, broadcast_buffers=False),
    "fsdp fp32": on_ranks("fsdp", "fp32"),
    "fsdp bf16": on_ranks("fsdp", "bf16", policy="bf16"),
    "fsdp fp16": on_ranks("fsdp", "fp16"),
    "fsdp fp16 accumulated": on_ranks("fsdp", "fp16", accumulate=3),
    "fsdp bf16 accumulated, known end": on_ranks("fsdp", "bf16", accumulate=3, knows_end=True, policy="bf16"),
    "fsdp fp32 accumulated, whole": on_ranks("fsdp", "fp32", accumulate=3, nested=False),
}


def interrupted(rank: int, folder: Path, names: Sequence[str], at: Sequence[int]) -> dict[str, list[Facts]]:
    """Stops each run at some steps, and makes sure on every rank that it is the one that never stopped; returns what steps say."""
    said = {}
    for name in names:
        place = folder / name.replace(",", "").replace(" ", "-")
        place.mkdir(exist_ok=True)
        try:
            said[name] = sweep(CASES[name], at=at, folder=place, steps=STEPS, rank=rank)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return said
